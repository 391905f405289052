"""The decoding programs compiled at full size for a cluster that need not be there: nothing is allocated.

The programs are `decoding.programs.Programs`', lowered on abstract parameters and an abstract state that lie on a mesh
of compile-only devices. It works on a machine without a GPU, in a process that runs on the CPU.
"""

import contextlib
import dataclasses
import functools
import re
import resource
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kimi_jax.decoding.dflash_drafter import DFlashContext, DFlashDrafter
from kimi_jax.decoding.loading import model_for
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.sampling import Draws
from kimi_jax.decoding.speculation import Speculation
from kimi_jax.decoding.state import DecodeState, Dispatch, Lanes
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.ledger import layout_rules
from kimi_jax.model.attention import LatentAttention
from kimi_jax.model.moe import Experts, Router
from kimi_jax.model.transformer import Transformer
from kimi_jax.parallel import collectives
from kimi_jax.parallel.exchange.choice import may_overflow
from kimi_jax.parallel.sharding import REQUESTS, rules
from kimi_jax.parameters import Parameters, abstract
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.placed import Placed
from meshes.devices import build_mesh
from meshes.targets import topology_devices
from pallas_kernels.assembler import Assembled, caught_output, read, with_shared_memory

DISPATCH_ROUNDS = 8
"""Rounds of the dispatch that is compiled as `decode`."""


class CompileError(RuntimeError):
    """A program that does not lower or compile; the message names the layer, part and axis."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program and everything the report reads of it."""

    case: Case
    text: str
    """Scheduled, optimised HLO."""
    temporaries: int
    """Bytes on one device beside arguments and outputs, as XLA laid them out."""
    peak: int
    """Bytes that are alive on one device at once, at most."""
    lower_seconds: float
    compile_seconds: float
    weights: tuple[Placed, ...]
    """Every array of the target, `target.…`, and the drafter, `drafter.…`."""
    state: tuple[Placed, ...]
    """Every array of the decoding state."""
    assembled: tuple[Assembled, ...] = ()
    """Pallas kernels, where the assembler's report was asked for."""
    host_bytes: int = 0
    """Most memory this process has held, the compile included."""


def programs_of(case: Case, mesh: Mesh) -> Programs:
    """The decoding programs of a case, as the engine makes them, with greedy sampling.

    Raises:
      LayoutError: a dimension that the layout does not divide, naming the sizes that work.
    """
    layout = case.preset.layout
    layout_rules.check(case.config, layout, case.drafter)
    model = model_for(case.config, layout)
    speculation = Speculation()
    if case.budget and case.drafter is not None:
        context = DFlashContext(DFlash(case.drafter, layout.tp), layout.tp)
        speculation = Speculation(DFlashDrafter(context, "tree", case.budget))
    return Programs(
        model, mesh, rules(layout), Draws(), case.dtype, speculation,
        exchange_may_overflow=may_overflow(layout, case.config.num_experts_per_tok, case.expert_slots),
    )  # fmt: skip


def compile_program(
    case: Case, *, dump: Path | None = None, registers: bool = False, stage: Callable[[str], None] = lambda name: None
) -> Compiled:
    """Compiles a case for its GPU; nothing runs and nothing is allocated.

    Args:
      case: the program, model, machine and load.
      dump: directory for XLA's own dump: HLO before and after, buffer assignment.
      registers: catch the assembler's report on the Pallas kernels.
      stage: told what begins.

    Raises:
      LayoutError: a dimension that the layout does not divide, naming the sizes that work.
      CompileError: naming the layer and part that does not lower or compile.
      RuntimeError: no CUDA plugin.
    """
    programs = _absent_programs(case)
    arguments = program_arguments(case, programs, abstract_parameters(programs))
    return compile_for(case, programs, arguments, dump=dump, registers=registers, stage=stage)[0]


def held_arrays(case: Case) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """Weights and decoding state of a case as one device of absent GPUs would hold them; nothing is compiled."""
    programs = _absent_programs(case)
    state = _state(programs, case)
    return tuple(_placed(abstract_parameters(programs))), tuple(_placed(state))


def _absent_programs(case: Case) -> Programs:
    if case.gpu is None:
        raise ValueError("a case to compile for absent GPUs needs the name of one")
    return programs_of(case, build_mesh(case.preset, topology_devices(case.preset, case.gpu)))


def program_arguments(case: Case, programs: Programs, parameters: Parameters) -> list[Any]:
    """What a case's program takes: parameters that are given, everything else abstract."""
    mesh, slots = programs.mesh, case.padded_requests

    def array(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return _array(mesh, shape, dtype, REQUESTS)

    table = array((slots, case.capacity // programs.page_tokens), jnp.int32)
    now: Any = Dispatch(cast(Any, table), cast(Any, array((slots,), jnp.bool_)))
    arguments: list[Any] = [parameters, _state(programs, case), now]
    if case.program == "decode" and programs.ends_early:
        arguments.append(_array(mesh, (), jnp.int32, PartitionSpec()))
    if case.program in ("prefill", "mixed"):
        lanes = slots if case.program == "prefill" else programs.groups
        shapes: list[Any] = [((lanes, case.prefill_chunk), jnp.int32), ((lanes,), jnp.int32), ((lanes,), jnp.int32)]
        arguments.append(Lanes(*(cast(Any, array(*each)) for each in [*shapes, ((lanes,), jnp.bool_)])))
    return arguments


def _program(case: Case, programs: Programs) -> Any:
    """The jitted function of a case."""
    slots = case.padded_requests // programs.groups
    if case.program == "round":
        return programs.round
    if case.program == "decode":
        return programs.decode(slots, DISPATCH_ROUNDS)
    tiles = case.capacity // programs.page_tokens
    return programs.mixed(slots, tiles) if case.program == "mixed" else programs.chunk(slots, tiles)


def compile_for(
    case: Case,
    programs: Programs,
    arguments: Sequence[Any],
    *,
    dump: Path | None = None,
    registers: bool = False,
    stage: Callable[[str], None] = lambda name: None,
) -> tuple[Compiled, jax.stages.Compiled]:
    """Compiles a case's program for arguments, parameters and state first, that are arrays or say how they would lie.

    Returns what the report reads, and the program itself. Options and errors are `compile_program`'s.
    """
    layers = f"{case.config.num_hidden_layers} layers for {case.preset.layout.num_devices} {case.gpu or 'CPU devices'}"
    what = f"the {case.program} program for {case.preset.name} ({case.preset.layout}) on {case.gpu or 'CPU devices'}"
    started = time.perf_counter()
    stage(f"lowering {layers}")
    try:
        lowered = _program(case, programs).lower(*arguments)
    except Exception as error:
        raise CompileError(f"{what} does not lower{_where(error)}: {error}") from error
    lowered_at = time.perf_counter()
    stage(f"compiling {layers}")
    try:
        with caught_output(registers) as printed, compilation_cache_off(dump is not None):
            compiled = lowered.compile(dump_options(dump))
    except Exception as error:
        raise CompileError(f"{what} does not compile{_part_in(str(error))}: {error}") from error
    compiled_at = time.perf_counter()
    stage("reading the compiled program")
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return (
        Compiled(
            case=case,
            text=text,
            temporaries=memory.temp_size_in_bytes,
            peak=memory.peak_memory_in_bytes,
            lower_seconds=lowered_at - started,
            compile_seconds=compiled_at - lowered_at,
            weights=tuple(_placed(arguments[0])),
            state=tuple(_placed(arguments[1])),
            assembled=with_shared_memory(read("".join(printed)), text) if registers else (),
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        ),
        compiled,
    )


@contextlib.contextmanager
def compilation_cache_off(wanted: bool) -> Iterator[None]:
    """Compiles anew what stands in JAX's compilation cache: XLA dumps the passes only of what it compiles."""
    before = jax.config.jax_enable_compilation_cache
    if not wanted or not before:
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks only once whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def dump_options(dump: Path | None) -> dict[str, Any] | None:
    """XLA's options for a dump into a directory, which is made."""
    if dump is None:
        return None
    dump.mkdir(parents=True, exist_ok=True)
    return {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}


def _array(mesh: Mesh, shape: tuple[int, ...], dtype: DTypeLike, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def abstract_parameters(programs: Programs) -> Parameters:
    """Shapes and shardings of what the programs need."""
    modules = {"target": programs.model, "drafter": programs.speculation.module}
    parameters: Parameters = {}
    for name in programs.needs:
        module = modules[name]
        assert module is not None
        parameters[name] = abstract(module, programs.dtype, programs.mesh, programs.rules)
    return parameters


def _state(programs: Programs, case: Case) -> DecodeState:
    slots, mesh = case.padded_requests, programs.mesh
    pages = slots * case.capacity // programs.page_tokens
    start = functools.partial(programs.start, slots=slots, pages=pages, capacity=case.capacity)
    shapes = cast(DecodeState, jax.eval_shape(start))

    def place(spec: PartitionSpec, value: Any) -> Any:
        return jax.tree.map(lambda leaf: _array(mesh, leaf.shape, leaf.dtype, spec), value)

    return jax.tree.map(place, programs.state_specs, shapes)


def _placed(tree: Any) -> Iterator[Placed]:
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        yield Placed(name, leaf.sharding.shard_shape(leaf.shape), str(leaf.dtype))


_PART_OF_MODULE: tuple[tuple[type, str], ...] = (
    (LatentAttention, "attention"),
    (Router, "router"),
    (Experts, "experts"),
    (DFlash, "drafter"),
)


def _where(error: Exception) -> str:
    """The layer, part and mesh axis being traced when an error was raised, from the frames of the model's own code."""
    layer = part = axis = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        local = frame.f_locals
        if isinstance(local.get("self"), Transformer) and "index" in local:
            layer = f" in layer {local['index']}"
        for module, name in _PART_OF_MODULE:
            if isinstance(local.get("self"), module):
                part = f" in {name}" if not layer else f", {name}"
        if frame.f_globals.get("__name__") == collectives.__name__ and "axis" in local:
            axis = f", over axis {local['axis']}"
    return layer + part + axis


def _part_in(message: str) -> str:
    """The layer and part that a compiler's message names through its scopes."""
    found = re.search(r"layer(\d+)/(\w+)", message)
    return f" in layer {found[1]}, {found[2]}" if found else ""
