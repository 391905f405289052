"""Rotary position embedding with YaRN, on interleaved pairs (dims 2i and 2i+1 share a frequency)."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kimi_jax.config import Yarn

Rotation = tuple[Float[Array, "... half"], Float[Array, "... half"]]
"""cos and sin of every pair's angle."""


def inverse_frequencies(dim: int, theta: float, yarn: Yarn | None) -> Float[np.ndarray, " half"]:
    """Angular frequency of each of the dim/2 pairs, in radians a position (float64).

    YaRN (arXiv 2309.00071, section 3.2) keeps fast pairs, divides slow ones by `factor`, and blends linearly between
    the pairs that turn `beta_fast` and `beta_slow` times over the original context.
    """
    pairs = np.arange(dim // 2)
    plain = theta ** (-2.0 * pairs / dim)
    if yarn is None:
        return plain

    def pair_turning(turns: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    ramp = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def rotation(
    positions: Int[Array, "..."], frequencies: Float[np.ndarray, " half"], amplitude: float = 1.0
) -> Rotation:
    """cos and sin of every pair's angle at the positions, in float32, times `amplitude`."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate_interleaved(
    x: Float[Array, "... dim"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... dim"]:
    """Turns pairs (2i, 2i+1); computed in float32, returned in the input's type and order."""
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
