"""Rotary position embedding with YaRN."""

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

    low, high = pair_turning(yarn.beta_fast), pair_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # `high` is negative where the original context is shorter than a turn; then, as in transformers, no pair is slow.
    ramp = np.clip((pairs - low) / (high - low or 0.001), 0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def rotation(positions: Int[Array, "..."], frequencies: Float[np.ndarray, " half"], amplitude: float = 1.0) -> Rotation:
    """cos and sin of every pair's angle at the positions, in float32, times `amplitude`."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(
    x: Float[Array, "... dim"], cos: Float[Array, "... half"], sin: Float[Array, "... half"], *, interleaved: bool
) -> Float[Array, "... dim"]:
    """Turns pairs (2i, 2i+1), or else (i, i + dim/2); computed in float32, returned in the input's type and order."""
    halves = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    first, second = (half.astype(jnp.float32) for half in halves)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1 if interleaved else -2)
    return turned.reshape(x.shape).astype(x.dtype)
