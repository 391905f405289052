"""What tree attention is timed on and against; `scripts/benchmark.py kernels` runs it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.timing import Case
from pallas_kernels.tree_attention import reference
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.selection import Device, choose
from pallas_kernels.tree_attention.shapes import SCALE, Shape, problem

SMALL = {"tree": Shape(2, 9, 8, 136, (130, 40), kv_lora_rank=128)}
"""For the interpreter."""
CACHE_SETS = 4
CACHE_BYTES = 24e9  # at most, over all sets
SCORE_BYTES = 2**33  # the most that jax's attention may hold


def jax_attention(
    q_latent, q_rope, cache_latent, cache_rope, lengths, row_latent, row_rope, ancestors, *, scale: float
):
    """What jax offers, `jax.nn.dot_product_attention`: keys of context and rows concatenated, one dense mask."""
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


def case(
    name: str,
    shape: Shape,
    device: Device,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
    sets: int = CACHE_SETS,
) -> Case:
    """One shape: what "auto" takes on `device`, the pair form on Blackwell, the reference, and jax's own attention."""
    sizes = {
        "requests": shape.requests, "rows": shape.rows, "heads": shape.heads, "positions": shape.positions,
        "kv_lora_rank": shape.kv_lora_rank, "rope": shape.rope, "device": device,
    }  # fmt: skip
    chosen = choose(**sizes)

    def call(function: Callable, **options) -> Callable[..., jax.Array]:
        return lambda q_latent, *rest: function(q_latent, *rest, scale=SCALE, **options)[0]

    def kernel(implementation: str) -> Callable[..., jax.Array]:
        config = choose(**sizes, implementation=implementation).config  # pyright: ignore[reportArgumentType]
        return call(tree_attention, implementation=implementation, config=config, interpret=interpret)

    def exact(*arguments: jax.Array) -> jax.Array:
        widened = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in arguments]
        return reference.tree_attention(*widened, scale=SCALE)[0]

    score_bytes = 4 * shape.requests * shape.rows * shape.heads * shape.positions
    calls: dict[str, Callable[..., jax.Array] | str] = {"auto": kernel(chosen.implementation)}
    if device.kernel == "blackwell":
        one_context = shape.kv_lora_rank in (256, 512) and interpret is None
        calls["blackwell_pair"] = kernel("blackwell_pair") if one_context else "not served here"
    calls["reference"] = call(reference.tree_attention)
    holds = f"it would hold {score_bytes / 1e9:.0f} GB of scores"
    calls["jax.nn.dot_product_attention"] = call(jax_attention) if score_bytes < SCORE_BYTES else holds
    count = max(1, min(sets, int(CACHE_BYTES // shape.cache_bytes)))
    problems = [problem(shape, seed=seed) for seed in range(count)]
    return Case(
        operation="tree_attention",
        shape=name,
        chosen=f"{chosen.implementation}: {chosen.reason}",
        least_bytes=shape.cache_bytes,
        operations=shape.operations,
        x=problems[0][0],
        sets=[arguments[1:] for arguments in problems],
        calls=calls,
        exact=exact,
    )
