"""The drafter's context: keys and values of the last `draft_window` committed positions, a ring for each layer.

Where prompts share pages, all committed positions also stand in a pool, under the pages of the target's latents: a text
that begins in pages which another has filled gets its ring from them, and drafts as if it had run them itself.

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
from kimi_jax.model.pages import find_places


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerContext:
    """Normalised and rotated keys, and values, of one layer; heads first, as both products read them in place.

    Of rings the rows are the window's slots; of new rows they are in order; of a pool the pages stand in place of the
    requests, and the rows are a page's positions.
    """

    keys: Float[Array, "requests kv_heads rows head_dim"]
    values: Float[Array, "requests kv_heads rows head_dim"]


Context = list[LayerContext]
"""One entry a layer."""

CONTEXT = PartitionSpec(("dp", "ep"), "tp", None, None)
"""How every array of a context lies on the mesh."""


def empty_context(
    config: DrafterConfig, requests: int, dtype: DTypeLike, tp: int = 1, rows: int | None = None
) -> Context:
    """A context of nothing, as global arrays (laid out by `CONTEXT`): rings of the draft window, or of so many rows.

    Where tp exceeds the key-value heads each device holds the one head its queries read, so the heads count `tp`.
    """
    heads = max(config.num_key_value_heads, tp)
    shape = (requests, heads, config.draft_window if rows is None else rows, config.head_dim)
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
    context: Context,
    rows: Context,
    start: Int[Array, " requests"],
    count: Int[Array, " requests"],
    requests: Int[Array, " requests"] | None = None,
) -> Context:
    """The context with new rows at positions `start` and on, of `requests` or of all in order.

    Only the first `count` rows of a request are real; positions before `start` must be there already. A whole prompt,
    a chunk of it, or the accepted path of a round.
    """
    slots = write_slots(start, count, rows[0].keys.shape[2], context[0].keys.shape[2])
    requests = jnp.arange(len(start)) if requests is None else requests
    return _put(context, rows, requests[:, None], slots)


def keep(
    pool: Context,
    rows: Context,
    pages: Int[Array, "requests tiles"],
    start: Int[Array, " requests"],
    count: Int[Array, " requests"],
) -> Context:
    """The pool with the same rows in the pages of their positions."""
    row, (held, _, size, _) = jnp.arange(rows[0].keys.shape[2]), pool[0].keys.shape
    places = find_places((held, size), pages, start[:, None] + row, row < count[:, None])
    page, offset = (place.reshape(len(start), -1) for place in (places.pages, places.offsets))
    return _put(pool, rows, page, offset, unique_indices=True)


def restore(
    context: Context,
    pool: Context,
    pages: Int[Array, "requests tiles"],
    lengths: Int[Array, " requests"],
    requests: Int[Array, " requests"],
) -> Context:
    """The context with what it would hold of `requests` whose first `lengths` positions are those of their pages.

    A request past the last is dropped.
    """
    window, size = context[0].keys.shape[2], pool[0].keys.shape[2]
    position = jnp.maximum(slot_positions(lengths, window)[0], 0)  # a slot without a position is not looked at
    page = jnp.take_along_axis(pages, position // size, axis=1)

    def copy(old: Array, held: Array) -> Array:
        found = held.at[page, :, position % size].get(mode="clip")
        return old.at[requests].set(found.swapaxes(1, 2), mode="drop")

    return jax.tree.map(copy, context, pool)


def _put(
    context: Context,
    rows: Context,
    requests: Int[Array, "requests #rows"],
    slots: Int[Array, "requests rows"],
    unique_indices: bool = False,
) -> Context:
    """Writes rows to their places, in place where the context is donated; what lies past its end is dropped.

    Values that are not finite become zeros: a ring's next owner multiplies them by weights of zero.
    """
    head = jnp.arange(rows[0].keys.shape[1])[:, None]

    def put(old: Array, new: Array) -> Array:
        new = jnp.where(jnp.isfinite(new), new, 0).astype(old.dtype)
        places = old.at[requests[:, None], head, slots[:, None]]
        return places.set(new, mode="drop", unique_indices=unique_indices)

    return jax.tree.map(put, context, rows)


def slot_positions(
    start: Int[Array, " requests"], window: int
) -> tuple[Int[Array, "requests window"], Bool[Array, "requests window"]]:
    """Position held by each slot when positions 0 .. start - 1 have been written, and whether there is one."""
    last = start[:, None] - 1
    position = last - (last - jnp.arange(window)) % window
    return position, position >= 0
