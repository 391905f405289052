"""How long a way to compute an operation takes on the GPU at hand, beside its copy bandwidth and the data sheet."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from meshes.hardware import GPU
from pallas_kernels.operation import Checked, Device, Operation, check

SPREAD = 1e-3
"""How much of a result is added to the input of the next call: each depends on the last, and none overflows."""
CALLS = 64
"""Calls in a timed program: what it costs to start one is shared by all."""
SETS = 8
SET_BYTES = 24e9
"""At most, over all sets of operands."""
SIMULATED_CORES = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long a call takes."""

    us: float
    of_copy: float
    """Necessary bytes over time, as a fraction of the card's own copy bandwidth."""
    of_floor: float | None
    """The data sheet's floor over time: the larger of bytes over bandwidth and operations over dense bfloat16 rate."""


def measure(
    call: Callable[..., Any], operation: Operation, name: str, card: GPU | None, copy_rate: float, repeats: int
) -> Timing:
    """Times `call` on problems of a named shape.

    The operands rotate over several sets, so that no call finds its own in the second-level cache.
    """
    shape = operation.shapes[name]
    problems = [operation.problem(shape)]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(problems))
    problems += [operation.problem(shape, seed) for seed in range(1, min(SETS, int(SET_BYTES // held) or 1))]
    needs = [operation.necessary(shape, arguments) for arguments in problems]
    necessary, operations = (statistics.mean(figures) for figures in zip(*needs, strict=True))
    us = microseconds(call, problems[0][0], [arguments[1:] for arguments in problems], repeats)
    floor = max(necessary / card.hbm_bytes_per_s, operations / card.bf16_flops_per_s) * 1e6 if card else None
    return Timing(us, of_copy=necessary / us / copy_rate * 1e6, of_floor=floor / us if floor else None)


def microseconds(call: Callable[..., Any], x: jax.Array, sets: Sequence[Sequence[Any]], repeats: int) -> float:
    """A call's time in a program of many, from which that of the same program without them is subtracted."""
    whole, empty = (
        median_seconds(jax.jit(chain(step, CALLS)), x, sets, repeats=repeats) for step in (call, lambda x, *_: x)
    )
    return max(whole - empty, 1e-9) / CALLS * 1e6


def chain(call: Callable[..., Any], count: int) -> Callable[[jax.Array, Sequence[Sequence[Any]]], jax.Array]:
    """A program of `count` calls that take the sets in turn, each on what the one before it gave.

    The first output of a call must have the shape of its first argument.
    """
    once = jax.jit(call)  # traced and lowered once for all calls

    def run(x: jax.Array, sets: Sequence[Sequence[Any]]) -> jax.Array:
        for i in range(count):
            out = jax.tree.leaves(once(x, *sets[i % len(sets)]))[0]
            x = lax.optimization_barrier(x + (SPREAD * out).astype(x.dtype))
        return x

    return run


def median_seconds(program: Callable[..., Any], *operands: Any, repeats: int) -> float:
    """Median time of a compiled call by `clock()`, after two calls that warm up.

    CUPTI's is the sum over the program's kernels, without the gaps between them.
    """
    once = _by_cupti if clock() == "CUPTI" else _by_host
    for _ in range(2):
        jax.block_until_ready(program(*operands))
    return statistics.median(once(program, *operands) for _ in range(repeats))


def _by_host(program: Callable[..., Any], *operands: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*operands))
    return time.perf_counter() - start


def _by_cupti(program: Callable[..., Any], *operands: Any) -> float:
    from jax.experimental.mosaic.gpu import profiler

    return (profiler.measure(program)(*operands)[1] or 0.0) / 1e3


@functools.cache
def clock() -> Literal["CUPTI", "host"]:
    """What times a program: the driver's profiling interface where this process may use it, else the host's clock."""
    if jax.default_backend() != "gpu":
        return "host"
    try:
        return "CUPTI" if _by_cupti(jax.jit(jnp.cos), jnp.zeros(1024)) else "host"
    except RuntimeError:  # another profiler is attached, or the driver keeps its counters from users
        return "host"


def copy_bytes_per_s(repeats: int) -> float:
    """Bytes read plus bytes written per second by a 4 GiB copy: what this card's memory gives a simple kernel."""
    source = jnp.zeros((2**30,), jnp.int32)
    return 2 * source.nbytes / median_seconds(jax.jit(lambda a: a + 1), source, repeats=repeats)


def rehearse(card: GPU, operation: Operation) -> Iterator[Checked]:
    """The values of a card's kernels on the table of cases, in Mosaic's interpreter; nothing is timed.

    Raises:
      ValueError: the card has no kernels.
      RuntimeError: a kernel differs by more than rounding, or a race.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    device = Device(card.device_kind, "{}.{}".format(*card.compute_capability), SIMULATED_CORES)
    if device.architecture is None:
        raise ValueError(f"there are no kernels for {card.device_kind}: give h200 or gb300")
    cases = {name: case for name, case in operation.cases.items() if not case.slow}
    for implementation, name in operation.trials(device, cases):
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        yield check(operation, name, cases[name], device, implementation, interpret)
