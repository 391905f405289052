"""Time the INT4 mixture of experts on the GPU of this machine, against its copy bandwidth and a plain JAX baseline.

    python -m pallas_kernels.int4_moe.benchmark
    python -m pallas_kernels.int4_moe.benchmark --shapes 'ep-48-.*' --implementation reference

Each timed program calls the operation on several weight sets in turn, so that no call finds its weights in the L2
cache and the cost of a dispatch is shared; the figure is the median over repetitions, divided by the calls. Routing is
uniform and independent, a new draw for every call.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.int4_moe.api import int4_moe, self_check
from pallas_kernels.int4_moe.plan import Implementation, Shape, current_target, plan
from pallas_kernels.int4_moe.reference import dequantize
from pallas_kernels.int4_moe.shapes import SHAPES

DEFAULT_SHAPES = r"ep-(6|48)-rows-(1|8|64|512|4096)|tp-(8|32)-rows-(1|8|64|512)"
WEIGHT_SETS = 8
WEIGHT_BYTES = 48e9  # at most, over all sets
BASELINE_BYTES = 24e9  # the baseline holds one set of weights in bfloat16


def median_seconds(program: Callable[..., Any], *operands: Any, repetitions: int = 30) -> float:
    """Median wall time of a compiled call, after two calls that warm up."""
    for _ in range(2):
        jax.block_until_ready(program(*operands))
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """Bytes read plus bytes written per second by a 4 GiB copy: what this card's memory gives a simple kernel."""
    source = jnp.zeros((2**30,), jnp.int32)
    seconds = median_seconds(jax.jit(lambda a: a + 1), source)
    return 2 * source.nbytes / seconds


def expert_bytes(shape: Shape) -> float:
    """Bytes of one expert's local weights and scales: 4.5 bits a weight."""
    return 3 * shape.hidden * shape.width * (0.5 + 2 / 32)


def weights(shape: Shape, key: jax.Array) -> list[jax.Array]:
    """One set of weights with random codes."""
    out = []
    for a, b in ((shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width)):
        key, first, second = jax.random.split(key, 3)
        out.append(jax.random.bits(first, (shape.slots, a, b // 8), jnp.uint32).view(jnp.int32))
        out.append(jax.random.uniform(second, (shape.slots, a, b // 32), jnp.bfloat16, 0.005, 0.02))
    return out


def routing(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Slot ids of a rank that holds the first `slots` experts; the others are foreign."""
    return np.stack([rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(shape.rows)]).astype(np.int32)


def ragged_dot_moe(x: jax.Array, ids: jax.Array, router: jax.Array, *operands: jax.Array) -> jax.Array:
    """The baseline: dequantise everything, sort the pairs by expert, three ragged products."""
    gate, up, down = (dequantize(operands[i], operands[i + 1]).astype(jnp.bfloat16).swapaxes(1, 2) for i in (0, 2, 4))
    slots, top_k = gate.shape[0], ids.shape[1]
    flat = jnp.where((ids >= 0) & (ids < slots), ids, slots).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(slots), 0, dtype=jnp.int32)
    a = x[order // top_k]
    h = jax.nn.silu(jax.lax.ragged_dot(a, gate, sizes)) * jax.lax.ragged_dot(a, up, sizes)
    y = jax.lax.ragged_dot(h, down, sizes).astype(jnp.float32)
    weight = jnp.where(flat < slots, router.reshape(-1), 0.0)[order]
    return (
        jnp.zeros(x.shape, jnp.float32).at[order // top_k].add(jnp.where(weight[:, None] != 0, y, 0) * weight[:, None])
    )


def measure(shape: Shape, implementation: Implementation, bandwidth: float, rng: np.random.Generator) -> str:
    """One line of the table."""
    set_bytes = shape.slots * expert_bytes(shape)
    count = max(1, min(WEIGHT_SETS, int(WEIGHT_BYTES // set_bytes)))
    sets = [weights(shape, jax.random.key(i)) for i in range(count)]
    calls = max(count, 4)
    ids = np.stack([routing(shape, rng) for _ in range(calls)])
    router = jnp.full((shape.rows, shape.top_k), 1 / shape.top_k, jnp.float32)
    x = jax.random.normal(jax.random.key(99), (shape.rows, shape.hidden), jnp.bfloat16)
    chosen = plan(shape, x.dtype, current_target(), implementation)

    def program(operation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def chain(x: jax.Array, ids: jax.Array, sets: list[list[jax.Array]]) -> jax.Array:
            for i in range(calls):
                x = x + (1e-3 * operation(x, ids[i], router, *sets[i % count])).astype(x.dtype)
            return x

        return jax.jit(chain)

    def ours(*operands: jax.Array) -> jax.Array:
        return int4_moe(*operands, num_experts=shape.num_experts, implementation=implementation)

    ids_on_device = jnp.asarray(ids)
    seconds = median_seconds(program(ours), x, ids_on_device, sets) / calls
    distinct = np.mean([np.unique(i[i < shape.slots]).size for i in ids])
    moved = distinct * expert_bytes(shape)
    baseline = ""
    if set_bytes / 4.5 * 16 < BASELINE_BYTES:
        one = sets[:1] * count
        baseline = f"{median_seconds(program(ragged_dot_moe), x, ids_on_device, one, repetitions=5) / calls * 1e6:.0f}"
    fraction = moved / seconds / bandwidth
    return (
        f"{shape.rows} | {shape.slots} | {shape.width} | {chosen.implementation} | {distinct:.1f} | "
        f"{seconds * 1e6:.1f} | {moved / seconds / 1e9:.0f} | {fraction:.2f} | {baseline}"
    )


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default=DEFAULT_SHAPES, help="regular expression over pallas_kernels.int4_moe.shapes"
    )
    parser.add_argument("--implementation", default="auto")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("No GPU here: this benchmark times GPU kernels and has nothing to say about other devices.")
    names = [name for name in SHAPES if re.fullmatch(arguments.shapes, name)]
    if not names:
        sys.exit(f"no shape matches {arguments.shapes!r}; there are {', '.join(SHAPES)}")
    for check in self_check():
        print(f"{check.plan.implementation}: relative error {check.relative_error:.1e} against the reference")
    bandwidth = copy_bytes_per_s()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, copy {bandwidth / 1e9:.0f} GB/s\n")
    print("rows | slots | width | implementation | distinct experts | µs | GB/s | of copy | ragged_dot µs")
    print("--- | --- | --- | --- | --- | --- | --- | --- | ---")
    rng = np.random.default_rng(0)
    for name in names:
        print(measure(SHAPES[name], arguments.implementation, bandwidth, rng), flush=True)


if __name__ == "__main__":
    main()
