"""The collectives a step uses, by mesh axis. Outside `shard_map` every axis has one member and nothing is sent.

All model code runs inside one `shard_map` over the whole program, so every message of a step is a call in this file:
the compiler adds none of its own, and a mesh axis of size one costs nothing.
"""

import jax
from jaxtyping import Array, Shaped

Axis = str | tuple[str, ...]


def axis_size(axis: Axis) -> int:
    """Members of a mesh axis, or of several together; 1 where the axis does not exist."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        return 1


def axis_index(axis: Axis) -> int | Shaped[Array, ""]:
    """This device's rank on the axis (row-major over several)."""
    return jax.lax.axis_index(axis) if axis_size(axis) > 1 else 0


def all_reduce(x: Shaped[Array, "..."], axis: Axis) -> Shaped[Array, "..."]:
    """Sum over the axis, the same on every member."""
    return jax.lax.psum(x, axis) if axis_size(axis) > 1 else x


def all_gather(x: Shaped[Array, "..."], axis: Axis, dimension: int = 0) -> Shaped[Array, "..."]:
    """The members' parts, concatenated along `dimension` in rank order."""
    return jax.lax.all_gather(x, axis, axis=dimension, tiled=True) if axis_size(axis) > 1 else x


def all_to_all(x: Shaped[Array, "..."], axis: Axis, split: int, join: int) -> Shaped[Array, "..."]:
    """Part i of dimension `split` goes to rank i; what comes in is concatenated along `join` in rank order."""
    if axis_size(axis) == 1:
        return x
    return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True)


def reduce_scatter(x: Shaped[Array, "..."], axis: Axis, dimension: int = 0) -> Shaped[Array, "..."]:
    """Sum over the axis, of which each member keeps its part along `dimension`."""
    if axis_size(axis) == 1:
        return x
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)
