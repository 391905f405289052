"""The ledger of the tower: what it holds, reads and computes for one picture on its device."""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.ledger.step import Need, Work
from kimi_jax.parameters import declarations
from kimi_jax.vision.config import VisionConfig
from kimi_jax.vision.media import TOKENS_PER
from kimi_jax.vision.tower import VisionModel

SCORE_BYTES = 16
"""Traffic of a score, which is no kernel's own: float32 is written, read for the largest and for the sum, and the
weights are written and read in two bytes."""


def vision(config: VisionConfig, patches: int, dtype: DTypeLike = jnp.bfloat16) -> Need:
    """The part `vision` for a picture in a program of so many patches, padding included.

    Every device holds all of the weights. `work` has the products with them and, as `scores`, the attention of all
    patches to all patches.
    """
    sizes: dict[str, int] = {"vision_tower": 0, "mm_projector": 0}
    item, held = jnp.dtype(dtype).itemsize, 0
    for declaration in declarations(VisionModel(config), dtype):
        values = math.prod(declaration.shape)
        held += values * item
        if declaration.path[-2] != "pos_emb" and len(declaration.shape) > 1:
            sizes[str(declaration.path[0])] += values
    rows = {"vision_tower": patches, "mm_projector": patches // TOKENS_PER}
    products = sum(2 * rows[name] * values for name, values in sizes.items())
    scores = config.num_hidden_layers * patches**2
    return Need(
        config.num_hidden_layers,
        weights=held,
        work={
            "weights": Work(held, products),
            "scores": Work(SCORE_BYTES * config.num_attention_heads * scores, 4 * config.hidden_size * scores),
        },
    )
