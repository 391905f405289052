"""Where the patches of a medium stand: learned positions resized to its grid, rotary angles, and how tokens merge.

A grid (frames, rows, columns) is an array and no part of a compiled program: patches lie row by row, frame by frame,
behind them is padding up to the number that the program was compiled for.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BASE = 10_000.0
"""Of both rotary and temporal frequencies."""
CUBIC = -0.75
"""Parameter a of the cubic kernel that positions are resized with, as torch's `interpolate` has it (Keys 1981)."""
MERGE = 2
"""Side of the square of patches that become one token."""
MAX_FRAMES = 4
"""Frames of a chunk that are averaged into one token, at most."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Frame, row and column of every patch; those of padding are arbitrary."""

    frames: Int[Array, " patches"]
    rows: Int[Array, " patches"]
    columns: Int[Array, " patches"]


def places(grid: Int[Array, "3"], patches: int) -> Places:
    """Where so many patches, padding among them, stand in a grid."""
    _, height, width = grid
    index = jnp.arange(patches)
    area = jnp.maximum(height * width, 1)
    within = index % area
    return Places(index // area, within // jnp.maximum(width, 1), within % jnp.maximum(width, 1))


def resized(
    table: Float[Array, "height width hidden"], grid: Int[Array, "3"], where: Places
) -> Float[Array, "patches hidden"]:
    """The learned positions, resized to the grid by the cubic kernel without antialiasing, of every patch in float32.

    A grid of the table's own size takes them as they are.
    """
    rows, row_weights = _taps(where.rows, table.shape[0], grid[1])
    columns, column_weights = _taps(where.columns, table.shape[1], grid[2])
    table = table.astype(jnp.float32)
    total = jnp.zeros((len(where.rows), table.shape[2]), jnp.float32)
    for row, row_weight in zip(rows, row_weights, strict=True):
        for column, column_weight in zip(columns, column_weights, strict=True):
            total += (row_weight * column_weight)[:, None] * table[row, column]
    return total


def _taps(at: Int[Array, " patches"], source: int, target: Int[Array, ""]) -> tuple[list[Array], list[Array]]:
    """Four neighbours along one side and their weights; those beyond the border are the border's."""
    scale = jnp.float32(source) / jnp.maximum(target, 1).astype(jnp.float32)
    centre = (at.astype(jnp.float32) + 0.5) * scale - 0.5
    first = jnp.floor(centre)
    t = centre - first

    def near(x: Array) -> Array:
        return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1

    def far(x: Array) -> Array:
        return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC

    indices = [jnp.clip(first.astype(jnp.int32) + offset, 0, source - 1) for offset in (-1, 0, 1, 2)]
    return indices, [far(t + 1), near(t), near(1 - t), far(2 - t)]


def temporal(frames: Int[Array, " patches"], grid: Int[Array, "3"], hidden: int) -> Float[Array, "patches hidden"]:
    """What a frame's number adds: sines and cosines; nothing at all where there is one frame."""
    frequencies = BASE ** (-jnp.arange(hidden // 2, dtype=jnp.float32) / (hidden // 2))
    phase = frames.astype(jnp.float32)[:, None] * frequencies
    return jnp.where(grid[0] > 1, jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], axis=1), 0)


def rotation(where: Places, head_dim: int) -> tuple[Float[Array, "patches pairs"], Float[Array, "patches pairs"]]:
    """Cosines and sines of a head's pairs: even ones turn by the column, odd ones by the row."""
    frequencies = BASE ** (-4 * jnp.arange(head_dim // 4, dtype=jnp.float32) / head_dim)
    both = jnp.stack([where.columns, where.rows], axis=-1).astype(jnp.float32)
    angles = (frequencies[:, None] * both[:, None, :]).reshape(len(both), head_dim // 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "patches heads width"], cos: Float[Array, "patches pairs"], sin: Float[Array, "patches pairs"]
) -> Float[Array, "patches heads width"]:
    """Turns the pairs (2i, 2i + 1) of every head, in float32."""
    wide = x.astype(jnp.float32)
    even, odd = wide[..., ::2], wide[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape).astype(x.dtype)


def merged(x: Float[Array, "patches hidden"], grid: Int[Array, "3"]) -> Float[Array, "tokens 4 hidden"]:
    """The four patches of every token, row by row, each the mean over frames; what stands behind the tokens is
    arbitrary."""
    count, height, width = grid
    index = jnp.arange(x.shape[0] // MERGE**2)
    across = jnp.maximum(width // MERGE, 1)
    row, column = index // across, index % across
    total = jnp.zeros((len(index), MERGE**2, x.shape[1]), jnp.float32)
    offsets = jnp.arange(MERGE**2)
    inner = (MERGE * row[:, None] + offsets // MERGE) * width + MERGE * column[:, None] + offsets % MERGE
    for frame in range(MAX_FRAMES):
        at = jnp.minimum(frame * height * width + inner, x.shape[0] - 1)
        total += jnp.where(frame < count, x[at].astype(jnp.float32), 0)
    return (total / jnp.maximum(count, 1)).astype(x.dtype)
