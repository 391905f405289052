"""How the kernels are timed and compared: cases of one operation, what may serve them, and the floor of a card.

Each operation's `benchmark.py` makes its cases; `scripts/benchmark.py kernels` runs them and prints the table.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshes.hardware import GPU

SPREAD = 1e-3
"""How much of a result is added to the input of the next call: each depends on the last, and none overflows."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of one operation, its operands and everything that can serve it.

    A call takes `x` and one of `sets` and gives an array of x's shape. The sets rotate, so that no call finds its
    operands in the second-level cache; `calls` maps a name to a function, or to the reason why it does not run.
    """

    operation: str
    shape: str
    chosen: str
    """What "auto" takes, with its reason."""
    least_bytes: float
    """Bytes that must be read from memory once by a call, on average over the sets."""
    operations: float
    """Multiplications and additions of a call."""
    x: jax.Array
    sets: Sequence[Sequence[Any]]
    calls: dict[str, Callable[..., jax.Array] | str]
    exact: Callable[..., jax.Array]
    """The specification, in float32."""

    def floor_us(self, gpu: GPU) -> float:
        """The larger of bytes over data-sheet bandwidth and operations over dense bfloat16 rate."""
        return max(self.least_bytes / gpu.hbm_bytes_per_s, self.operations / gpu.bf16_flops_per_s) * 1e6


@dataclasses.dataclass(frozen=True)
class Result:
    """One implementation on one case. Times are None where nothing was timed."""

    operation: str
    shape: str
    implementation: str
    note: str
    """Why it was chosen, or why it did not run."""
    relative_error: float | None = None
    """Frobenius, against the reference in float32."""
    us: float | None = None
    """Microseconds a call."""
    of_copy: float | None = None
    """Least bytes over time, as a fraction of the card's own copy bandwidth."""
    of_floor: float | None = None
    """Floor of the data sheet over time."""


def compare(case: Case, implementation: str) -> Result:
    """Runs one implementation once, on the first set, beside the specification."""
    call = case.calls[implementation]
    note = case.chosen if implementation == "auto" else ""
    if isinstance(call, str):
        return Result(case.operation, case.shape, implementation, call)
    got, expected = (np.asarray(jax.jit(f)(case.x, *case.sets[0]), np.float32) for f in (call, case.exact))
    error = float(np.linalg.norm(got - expected) / (np.linalg.norm(expected) or 1.0))
    return Result(case.operation, case.shape, implementation, note, error)


def timed(case: Case, result: Result, gpu: GPU | None, copy_rate: float, repeats: int) -> Result:
    """`result` with its times: the median of `repeats` runs of a program that calls it on every set in turn."""
    call = case.calls[result.implementation]
    if isinstance(call, str):
        return result
    count = max(len(case.sets), 4)
    seconds = median_seconds(jax.jit(chain(call, count)), case.x, case.sets, repeats=repeats) / count
    return dataclasses.replace(
        result,
        us=seconds * 1e6,
        of_copy=case.least_bytes / seconds / copy_rate,
        of_floor=case.floor_us(gpu) / seconds / 1e6 if gpu else None,
    )


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
