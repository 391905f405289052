"""How long the kernels take on the GPU at hand, beside its own copy bandwidth, the data sheet, and plain jax."""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshes.hardware import GPU
from pallas_kernels.alternatives import ALTERNATIVES
from pallas_kernels.operation import Device, Difference, Operation, check, differences

SPREAD = 1e-3
"""How much of a result is added to the input of the next call: each depends on the last, and none overflows."""
SIMULATED_CORES = 3
SETS = 8
SET_BYTES = 24e9
"""At most, over all sets of operands."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One way to compute an operation at one shape."""

    operation: str
    shape: str
    implementation: str
    note: str
    """Why it was chosen, or why it did not run."""
    difference: Difference | None = None
    """From the reference in float32."""
    us: float | None = None
    """Microseconds a call."""
    of_copy: float | None = None
    """Necessary bytes over time, as a fraction of the card's own copy bandwidth."""
    of_floor: float | None = None
    """The data sheet's floor over time: the larger of bytes over bandwidth and operations over dense bfloat16 rate."""


def shapes_of(operation: Operation, pattern: str) -> list[str]:
    """Names of an operation's shapes that match a regular expression."""
    return [name for name in operation.shapes if re.search(pattern, name)]


def measure(operation: Operation, name: str, card: GPU | None, copy_rate: float, repeats: int) -> list[Timing]:
    """Times what "auto" takes at a named shape on this device, and plain jax where that fits into memory.

    The operands rotate over several sets, so that no call finds its own in the second-level cache.
    """
    shape = operation.shapes[name]
    choice = operation.choose(shape, jnp.bfloat16, Device.current())
    first = operation.problem(shape)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    problems = [first, *(operation.problem(shape, seed) for seed in range(1, min(SETS, int(SET_BYTES // held) or 1)))]
    needs = [operation.necessary(shape, arguments) for arguments in problems]
    necessary, flops = (statistics.mean(figures) for figures in zip(*needs, strict=True))
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, first)
    want = jax.tree.leaves(jax.jit(operation.reference)(*exact))[0]

    def first_output(*arguments: Any) -> jax.Array:
        return jax.tree.leaves(operation.run(choice, *arguments))[0]

    results = []
    ways = {choice.implementation: (first_output, choice.reason), "plain jax": (ALTERNATIVES[operation.name], "")}
    for implementation, (call, note) in ways.items():
        try:
            difference = differences([jax.jit(call)(*first)], [want])[0]
            us = microseconds(call, first[0], [arguments[1:] for arguments in problems], repeats)
        except jax.errors.JaxRuntimeError as error:  # a dense form does not fit
            results.append(Timing(operation.name, name, implementation, str(error).splitlines()[0][:80]))
            continue
        floor = max(necessary / card.hbm_bytes_per_s, flops / card.bf16_flops_per_s) * 1e6 if card else None
        results.append(
            Timing(
                operation.name,
                name,
                implementation,
                note,
                difference,
                us,
                of_copy=necessary / us / copy_rate * 1e6,
                of_floor=floor / us if floor else None,
            )
        )
    return results


def microseconds(call: Callable[..., jax.Array], x: jax.Array, sets: Sequence[Sequence[Any]], repeats: int) -> float:
    """A call's time: of a program of calls that take the sets in turn, each on what the one before it gave."""
    count = max(len(sets), 4)
    return median_seconds(jax.jit(chain(call, count)), x, sets, repeats=repeats) / count * 1e6


def chain(call: Callable[..., jax.Array], count: int) -> Callable[[jax.Array, Sequence[Sequence[Any]]], jax.Array]:
    """A program of `count` calls that take the sets in turn, each on what the one before it gave."""

    def run(x: jax.Array, sets: Sequence[Sequence[Any]]) -> jax.Array:
        for i in range(count):
            x = x + (SPREAD * call(x, *sets[i % len(sets)])).astype(x.dtype)
        return x

    return run


def median_seconds(program: Callable[..., Any], *operands: Any, repeats: int) -> float:
    """Median wall time of a compiled call, after two calls that warm up."""
    for _ in range(2):
        jax.block_until_ready(program(*operands))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bytes_per_s(repeats: int) -> float:
    """Bytes read plus bytes written per second by a 4 GiB copy: what this card's memory gives a simple kernel."""
    source = jnp.zeros((2**30,), jnp.int32)
    return 2 * source.nbytes / median_seconds(jax.jit(lambda a: a + 1), source, repeats=repeats)


def rehearse(card: GPU, operations: Sequence[Operation], progress: Callable[[str], None]) -> list[Timing]:
    """The values of a card's kernels on the table of cases, in Mosaic's interpreter; nothing is timed.

    Raises:
      ValueError: the card has no kernels.
      RuntimeError: a kernel differs by more than rounding, or a race.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    device = Device(card.device_kind, "{}.{}".format(*card.compute_capability), SIMULATED_CORES)
    if device.architecture is None:
        raise ValueError(f"there are no kernels for {card.device_kind}: give h200 or gb300")
    results = []
    for operation in operations:
        cases = {name: case for name, case in operation.cases.items() if not case.slow}
        for implementation, name in operation.trials(device, cases):
            progress(f"{operation.name} {name} {implementation}")
            params = plgpu.InterpretGPUParams(detect_races=True)
            done = check(operation, name, cases[name], device, implementation, params)
            results.append(Timing(operation.name, name, implementation, done.choice.reason, done.differences[0]))
    return results
