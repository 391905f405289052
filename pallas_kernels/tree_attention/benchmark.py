"""Time tree attention on the GPU at hand: `python -m pallas_kernels.tree_attention.benchmark`.

For each named shape: microseconds a call, the share of this card's copy bandwidth (the cache read once) and of its
dense bfloat16 rate, beside jax's own attention (`jax.nn.dot_product_attention` on the concatenated 576-wide rows, one
key-value head) and the reference. Without a GPU it prints the bound of each shape on a named card, and times nothing.
"""

import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from jax import lax

from meshes.devices import use_cpu_if_no_gpu
from meshes.hardware import GPUS, gpu
from pallas_kernels.tree_attention import choose, reference, tree_attention
from pallas_kernels.tree_attention.selection import Device, current_device
from pallas_kernels.tree_attention.shapes import SCALE, SHAPES, Shape, problem


@dataclasses.dataclass
class Arguments:
    """What to time."""

    shapes: tuple[str, ...] = tuple(SHAPES)
    """Names from shapes.py."""
    calls: int = 20
    """Calls in a row, each taking the last one's output as queries; the time of one is reported."""
    repeats: int = 7
    """Medians are over this many runs."""
    card: str = "h200"
    """The card whose bounds are printed where there is no GPU."""
    json: Path | None = None
    """Also write the table here."""


def chained_seconds(attend, arguments, calls: int, repeats: int) -> float:
    """Seconds of one call: `calls` of them on the device without the host in between, median of `repeats` runs."""

    @jax.jit
    def run(q_latent, *rest):
        return lax.fori_loop(0, calls, lambda _, q: attend(q, *rest)[0].astype(q.dtype), q_latent)

    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def copy_bytes_per_s(repeats: int, gib: int = 4) -> float:
    """What a plain copy reaches: bytes read and bytes written, a second."""
    x = jnp.zeros((gib, 2**29), jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    jax.block_until_ready(copy(x))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(copy(x))
        times.append(time.perf_counter() - start)
    return 2 * x.nbytes / statistics.median(times)


def jax_attention(
    q_latent, q_rope, cache_latent, cache_rope, lengths, row_latent, row_rope, ancestors, *, scale: float
):
    """The einsum form of jax's library: keys of context and rows concatenated, one dense mask, scores in full."""
    keys = jnp.concatenate(
        [
            jnp.concatenate([cache_latent, cache_rope], axis=-1),
            jnp.concatenate([row_latent, row_rope], axis=-1),
        ],
        axis=1,
    )[:, :, None]
    context = jnp.arange(cache_latent.shape[1]) < lengths[:, None, None]
    mask = jnp.concatenate([jnp.broadcast_to(context, (*ancestors.shape[:2], context.shape[-1])), ancestors], axis=-1)
    out = jax.nn.dot_product_attention(
        jnp.concatenate([q_latent, q_rope], axis=-1), keys, keys, mask=mask[:, None], scale=scale
    )
    return out[..., : cache_latent.shape[-1]], None


def bounds(shape: Shape, card: str) -> dict:
    """Lower bounds of one call on a card, in microseconds, from its data sheet (meshes/hardware.py)."""
    facts = gpu(card)
    return {
        "memory_us": shape.cache_bytes / facts.hbm_bytes_per_s * 1e6,
        "tensor_us": shape.operations / facts.bf16_flops_per_s * 1e6,
    }


def measure(name: str, shape: Shape, arguments: Arguments, copy_rate: float, tensor_rate: float | None) -> dict:
    """Time one shape, and what stands beside it."""
    choice = choose(requests=shape.requests, rows=shape.rows, heads=shape.heads, positions=shape.positions)
    inputs = problem(shape)

    def timed(attend):
        return chained_seconds(functools.partial(attend, scale=SCALE), inputs, arguments.calls, arguments.repeats)

    seconds = timed(tree_attention)
    row = {
        "shape": name,
        "implementation": choice.implementation,
        "us": seconds * 1e6,
        "copy_fraction": shape.cache_bytes / seconds / copy_rate,
        "tensor_fraction": shape.operations / seconds / tensor_rate if tensor_rate else None,
        "reference_us": timed(reference.tree_attention) * 1e6,
    }
    scores_bytes = 4 * shape.requests * shape.rows * shape.heads * shape.positions
    row["jax_us"] = timed(jax_attention) * 1e6 if scores_bytes < 2**33 else None
    return row


def main(arguments: Arguments) -> None:
    """Print the table."""
    use_cpu_if_no_gpu()
    unknown = set(arguments.shapes) - set(SHAPES)
    if unknown:
        raise SystemExit(f"unknown shapes {', '.join(sorted(unknown))}: choose from {', '.join(SHAPES)}")
    device = current_device()
    chosen = {name: SHAPES[name] for name in arguments.shapes}
    if device.kernel is None:
        cores = gpu(arguments.card).core_count
        target = Device("gpu", gpu(arguments.card).device_kind, cores)
        print(f"No Hopper or Blackwell GPU here ({device.kind}): nothing is timed. Bounds on {arguments.card}:")
        rows = []
        for name, shape in chosen.items():
            choice = choose(
                requests=shape.requests,
                rows=shape.rows,
                heads=shape.heads,
                positions=shape.positions,
                device=target,
            )
            rows.append({"shape": name, **bounds(shape, arguments.card), "choice": choice.reason})
    else:
        card = next((g for g in GPUS.values() if device.kind.startswith(g.device_kind)), None)
        copy_rate = copy_bytes_per_s(arguments.repeats)
        print(f"{device.kind}: copies {copy_rate / 1e9:.0f} GB/s")
        tensor_rate = card.bf16_flops_per_s if card else None
        rows = [measure(name, shape, arguments, copy_rate, tensor_rate) for name, shape in chosen.items()]
    for row in rows:
        print(
            "  ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": device.kind, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
