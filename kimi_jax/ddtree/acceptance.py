"""Acceptance: which drafted tokens the target would have written itself, and what of them becomes text.

The target gives each row of a draft tree its next token, greedy or sampled, from the row's own prefix. The walk from
the root follows them while they are children. Whether a child exists depends only on what was drafted before the
token was sampled, so the text has exactly the target's distribution (arXiv 2604.12989, section 3).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kimi_jax.ddtree.tree import DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """One request's accepted path (vmap for more); `steps` is the tree's `max_depth` + 1."""

    path: Int[Array, "*batch steps"]
    """Accepted rows, the root first, rising; 0 past `length`. Their latents and taps are the ones to keep."""
    length: Int[Array, "*batch"]
    """Rows on the path, the root included: the acceptance length, which is the number of new tokens."""
    tokens: Int[Array, "*batch steps"]
    """New tokens: those of the path after the root, then the bonus token; -1 past `length`."""
    bonus: Int[Array, "*batch"]
    """The target's token after the path: the last of the new tokens and the root of the next round."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emission:
    """What one round adds to one request's text."""

    tokens: Int[Array, "*batch steps"]
    """The first `count` count, whatever their values; -1 after them."""
    count: Int[Array, "*batch"]
    finished: Bool[Array, "*batch"]


def walk(tree: DraftTree, next_tokens: Int[Array, " rows"]) -> Acceptance:
    """Walks down the tree from the root as long as the row's next token is one of its children."""
    arrived = tree.tokens == next_tokens[jnp.maximum(tree.parents, 0)]
    arrived = arrived.at[0].set(True)
    real = jnp.diagonal(tree.ancestors)
    accepted = real & ~jnp.any(tree.ancestors & ~arrived, axis=-1)
    last = jnp.argmax(jnp.where(accepted, tree.depths, -1))
    step = jnp.arange(tree.max_depth + 1)
    on_path = tree.ancestors[last] & (tree.depths == step[:, None])
    path = jnp.argmax(on_path, axis=-1)
    length = tree.depths[last] + 1
    # The next token of each row on the path is the token of the row after it, and of the last row the bonus.
    tokens = jnp.where(step < length, next_tokens[path], -1)
    return Acceptance(path=path, length=length, tokens=tokens, bonus=next_tokens[last])


def emit(
    tokens: Int[Array, " steps"], length: Int[Array, ""], stop_ids: Int[Array, " stops"], remaining: Int[Array, ""]
) -> Emission:
    """Cuts a round's new tokens after the first stop token and at `remaining`.

    Args:
      tokens: new tokens of the round (`Acceptance.tokens`), of which `length` count.
      length: how many the round accepted, the bonus token included.
      stop_ids: ids that end the text; the one that does is part of it. May be empty.
      remaining: tokens the request may still write; 0 for one that has finished, which then emits nothing.

    A request is finished when it wrote a stop token or has nothing remaining.
    """
    step = jnp.arange(tokens.shape[0])
    stops = jnp.any(tokens[:, None] == stop_ids, axis=-1) & (step < jnp.minimum(length, remaining))
    stopped = jnp.any(stops)
    count = jnp.minimum(length, remaining)
    count = jnp.where(stopped, jnp.argmax(stops) + 1, count)
    return Emission(jnp.where(step < count, tokens, -1), count, stopped | (count >= remaining))
