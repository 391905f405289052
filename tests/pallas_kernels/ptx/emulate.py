"""jax programs on the CPU whose Pallas kernels are executed by the emulator.

Inside `emulated(card)` a Pallas GPU kernel that is lowered for the CPU is compiled for the card, which need not be
there, and becomes a callback that executes the PTX of that compile. Everything around it runs on the CPU as ever, so
an operation is called by its public function.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.export
import numpy as np
from jax._src.interpreters import mlir as mlir_internal
from jax.interpreters import mlir

from ptx import compiler
from ptx.kernel import Kernel, Result, run
from ptx.machine import Order

_KERNELS: dict[tuple[str, str], Kernel] = {}


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel that was run: its name and operands, and what came of it."""

    name: str
    kernel: Kernel
    operands: list[np.ndarray]
    result: Result


@dataclasses.dataclass
class Emulation:
    """How kernels are run, and those that were.

    `ctas` gives the CTAs to run by a kernel's name; of others all run. `edit` may change a kernel before it runs.
    """

    card: str
    order: Order = dataclasses.field(default_factory=Order)
    ctas: dict[str, Iterable[int]] = dataclasses.field(default_factory=dict)
    edit: Callable[[str, Kernel], Kernel] | None = None
    calls: list[Call] = dataclasses.field(default_factory=list)
    compiled: dict[str, Kernel] = dataclasses.field(default_factory=dict)


def compile_kernel(card: str, function: Callable[..., Any], avals: Iterable[Any]) -> Kernel:
    """The one Mosaic kernel of a function of arrays, compiled for a card.

    Raises:
        RuntimeError: the compile failed, or left no kernel, or several.
    """
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    with _as_it_is_lowered():
        exported = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)(*shapes)
    program = bytes(exported.serialize())
    key = card, hashlib.sha256(program).hexdigest()
    if key not in _KERNELS:
        _KERNELS[key] = Kernel(*compiler.of(card).compile(program))
    return _KERNELS[key]


def kernels_of(card: str, function: Callable[..., Any], avals: Iterable[Any]) -> dict[str, Kernel]:
    """The kernels of a function of arrays, compiled for a card but not run, by name."""
    with emulated(card) as emulation:
        jax.jit(function).lower(*avals)
    return emulation.compiled


@contextlib.contextmanager
def _as_it_is_lowered() -> Iterator[None]:
    """Exported programs as this version of jax compiles them, not as older ones could read them."""
    before = jax.config.jax_export_ignore_forward_compatibility
    jax.config.update("jax_export_ignore_forward_compatibility", True)
    try:
        yield
    finally:
        jax.config.update("jax_export_ignore_forward_compatibility", before)


@contextlib.contextmanager
def emulated(card: str, **options: Any) -> Iterator[Emulation]:
    """Run Pallas GPU kernels in the emulator; yields the `Emulation` with these options."""
    emulation = Emulation(card, **options)
    primitives = _kernel_primitives()
    for primitive in primitives:
        mlir.register_lowering(primitive, functools.partial(_lower, emulation, primitive), platform="cpu")
    try:
        yield emulation
    finally:
        jax.clear_caches()
        for primitive in primitives:
            del mlir_internal._platform_specific_lowerings["cpu"][primitive]


def _kernel_primitives() -> list[Any]:
    """What a Pallas kernel is in a traced program: `mpmd_map` since jax 0.12, before it `pallas_call`."""
    from jax._src.pallas.pallas_call import pallas_call_p

    try:
        from jax._src.pallas.mpmd import mpmd_map_p
    except ImportError:
        return [pallas_call_p]
    return [pallas_call_p, mpmd_map_p]


def _lower(emulation: Emulation, primitive: Any, ctx: Any, *operands: Any, **parameters: Any) -> Any:
    kernel = compile_kernel(emulation.card, lambda *a: primitive.bind(*a, **parameters), ctx.avals_in)
    name = kernel.decoder.program.name.removesuffix("_mosaic_gpu_kernel")
    if emulation.edit is not None:
        kernel = emulation.edit(name, kernel)
    emulation.compiled[name] = kernel
    results = [(a.shape, np.dtype(a.dtype)) for a in ctx.avals_out]
    aliases = dict(parameters["input_output_aliases"])

    def execute(*arrays: Any) -> list[np.ndarray]:
        operands = [np.asarray(a) for a in arrays]
        ctas = emulation.ctas.get(name)
        result = run(kernel, operands, results, aliases=aliases, order=emulation.order, ctas=ctas)
        emulation.calls.append(Call(name, kernel, operands, result))
        return result.arrays

    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in results]
    return mlir.lower_fun(lambda *a: jax.pure_callback(execute, shapes, *a), multiple_results=True)(ctx, *operands)
