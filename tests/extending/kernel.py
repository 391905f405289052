"""Tree attention for plain decoding: one row sees its cached positions and itself, in one softmax."""

import jax
import jax.numpy as jnp

from pallas_kernels.operation import Implementation
from pallas_kernels.tree_attention.reference import gather
from pallas_kernels.tree_attention.selection import IMPLEMENTATIONS
from pallas_kernels.tree_attention.shapes import SCALE
from pallas_kernels.tree_attention.tile import Config


def obstacle(shape, dtype):
    """Why a call cannot be served; None where it can."""
    return None if shape.rows == 1 else f"there are {shape.rows} rows, and it serves plain decoding alone"


def configure(shape, device, **options):
    """Launch parameters; this one has none to choose."""
    return Config()


def run(
    config, q_latent, q_rope, latent, rope, pages, lengths, own_latent, own_rope, ancestors,
    *, scale=SCALE, interpret=None,
):  # fmt: skip
    """The outputs of the reference; a real kernel would be launched here."""
    cached = jnp.concatenate([gather(latent, pages), gather(rope, pages)], axis=-1)
    keys = jnp.concatenate([cached, jnp.concatenate([own_latent, own_rope], axis=-1)], axis=1)
    position = jnp.arange(keys.shape[1])
    seen = (position < lengths[:, None]) | (position == cached.shape[1])
    seen &= ancestors[:, 0]  # a padding row sees nothing
    keys = jnp.where(seen[..., None], keys, 0).astype(jnp.float32)  # what lies past the length may be anything
    query = jnp.concatenate([q_latent, q_rope], axis=-1)
    scores = jnp.einsum("brhe,bke->brhk", query, keys, precision="highest") * scale
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(seen[:, None, None], jnp.exp(scores - lse[..., None]), 0)
    out = jnp.einsum("brhk,bkc->brhc", weights, keys[..., : latent.shape[-1]], precision="highest")
    return out.astype(q_latent.dtype), lse


IMPLEMENTATIONS["decode"] = Implementation(("hopper", "blackwell"), obstacle, configure, run)
