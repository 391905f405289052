"""The drafter's context: keys and values of the last `draft_window` committed positions, a ring for each layer.

Only committed tokens that the target has run have taps, so the context of a round that starts at position `start` is
the positions before it; the block's own keys and values are never stored. A position stands in slot position mod
window, and later ones overwrite it. Rope is relative, so keys keep their absolute positions as the window moves.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.drafter.config import DrafterConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Normalised and rotated keys, and values, of one layer; heads first, as both products read them in place."""

    keys: Float[Array, "requests kv_heads window head_dim"]
    values: Float[Array, "requests kv_heads window head_dim"]


Context = list[LayerContext]
"""One entry a layer."""

CONTEXT = PartitionSpec(("dp", "ep"), "tp", None, None)
"""How every array of a context lies on the mesh."""


def empty_context(config: DrafterConfig, requests: int, dtype: DTypeLike, tp: int = 1) -> Context:
    """A context of nothing, as global arrays (laid out by `CONTEXT`).

    Where tp exceeds the key-value heads each device holds the one head its queries read, so the heads count `tp`.
    """
    heads = max(config.num_key_value_heads, tp)
    shape = (requests, heads, config.draft_window, config.head_dim)
    return [LayerContext(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers)]


def write_slots(
    start: Int[Array, " requests"], count: Int[Array, " requests"], rows: int, window: int
) -> Int[Array, "requests rows"]:
    """Slot of each of `rows` new rows at `start`; `window` (past the end: dropped) for those that are not kept.

    Kept are the first `count`, and of these the last `window`, so that no slot is written twice.
    """
    row = jnp.arange(rows)
    kept = (row < count[:, None]) & (row >= count[:, None] - window)
    return jnp.where(kept, (start[:, None] + row) % window, window)


def write(
    ring: LayerContext,
    slots: Int[Array, "requests rows"],
    rows: LayerContext,
    requests: Int[Array, " requests"] | None = None,
) -> LayerContext:
    """The rings of `requests`, or of all in order, with new rows in their slots; in place where they are donated.

    Values that are not finite become zeros: a ring's next owner multiplies them by weights of zero.
    """
    requests = jnp.arange(slots.shape[0]) if requests is None else requests
    request, head = requests[:, None, None], jnp.arange(rows.keys.shape[1])[:, None]

    def put(old: Array, new: Array) -> Array:
        new = jnp.where(jnp.isfinite(new), new, 0).astype(old.dtype)
        return old.at[request, head, slots[:, None]].set(new, mode="drop")

    return LayerContext(put(ring.keys, rows.keys), put(ring.values, rows.values))


def slot_positions(
    start: Int[Array, " requests"], window: int
) -> tuple[Int[Array, "requests window"], Bool[Array, "requests window"]]:
    """Position held by each slot when positions 0 .. start - 1 have been written, and whether there is one."""
    last = start[:, None] - 1
    position = last - (last - jnp.arange(window)) % window
    return position, position >= 0
