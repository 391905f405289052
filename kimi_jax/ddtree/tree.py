"""Draft trees: the prefixes a parallel drafter finds most probable, chosen on the device with static shapes.

DDTree (Ringel and Romano, arXiv 2604.12989): one forward of the drafter gives a distribution for each position of a
block. Of all prefixes that can be drawn from them, the `budget` most probable maximise the expected number of accepted
tokens, and they form a tree: no prefix is more probable than its parent. The reference pops them from a heap; here
they grow level by level. The best `budget` prefixes overall are among the best `budget` of each depth, and those
extend the best `budget` of the depth before, so every level is one small sort of candidates known at trace time.

Order is the reference's: cumulative log-probability falling, then the tuple of ranks lexicographically, a prefix
before its extensions. Ties between different paths must survive different orders of addition, so the sums are kept in
two float32 parts (Knuth's two-sum), which is as exact as the reference's float64.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.parallel.collectives import all_gather, axis_index

IMPOSSIBLE = -1e30
"""Stands for log 0 in sums: finite, so that no difference of two of them is NaN."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Rows to verify: row 0 is the root (the token already sampled), then nodes, parents before children.

    Nodes stand by falling cumulative log-probability, so the first n rows are themselves the best tree of n rows.
    Rows past `num_nodes` are padding: they see nothing, nobody sees them and they are never accepted.
    """

    tokens: Int[Array, "*batch rows"]
    """Token ids; 0 in padding."""
    parents: Int[Array, "*batch rows"]
    """Row of the parent; -1 for the root and in padding."""
    depths: Int[Array, "*batch rows"]
    """0 for the root and in padding; a row's position is the root's plus its depth."""
    cum_log_probs: Float[Array, "*batch rows"]
    """Log-probability of the path from the root; 0 for the root, -inf in padding."""
    ancestors: Bool[Array, "*batch rows rows"]
    """[r, s]: s is r or an ancestor of r."""
    num_nodes: Int[Array, "*batch"]
    """Nodes without the root."""
    max_depth: int = dataclasses.field(metadata={"static": True})
    """No path is longer; a round yields at most `max_depth` + 1 tokens."""


class _Prefixes(NamedTuple):
    """Candidate prefixes of one depth, or of all: nothing but what they are compared by, in that order."""

    off_chain: tuple[Int[Array, " n"], ...]
    """One array, 0 on the chain of argmaxes and 1 off it, where that chain is kept; else nothing."""
    high: Float[Array, " n"]
    low: Float[Array, " n"]
    """high + low is the surprisal, the negated cumulative log-probability."""
    path: tuple[Int[Array, " n"], ...]
    """The ranks along the path, packed: comparing the words compares the tuples (see `_Packing`)."""


class _Packing(NamedTuple):
    """A path as digits rank + 1, first depth in the highest bits, 0 where it has ended."""

    bits: int
    per_word: int
    words: int

    @classmethod
    def of(cls, depth: int, ranks: int) -> "_Packing":
        bits = max(1, ranks.bit_length())
        per_word = 31 // bits
        return cls(bits, per_word, -(-depth // per_word))

    def place(self, depth: int) -> tuple[int, int]:
        """Word and shift of the digit of a 1-based depth."""
        word, digit = divmod(depth - 1, self.per_word)
        return word, (self.per_word - 1 - digit) * self.bits

    def rank(self, path: tuple[Array, ...], depth: int) -> Array:
        """Rank of the prefix of each path that ends at a 1-based depth."""
        word, shift = self.place(depth)
        return ((path[word] >> shift) & ((1 << self.bits) - 1)) - 1

    def masks(self, depth: int) -> np.ndarray:
        """[depth + 1, words]: the bits that a path of each length uses."""
        masks = np.zeros((depth + 1, self.words), np.int32)
        for d in range(1, depth + 1):
            word, shift = self.place(d)
            masks[d:, word] |= ((1 << self.bits) - 1) << shift
        return masks


def build_tree(
    log_probs: Float[Array, "depth vocab"], budget: int, *, root: Int[Array, ""] | int = 0, keep_chain: bool = False
) -> DraftTree:
    """The best `budget` prefixes of independent positions; `jax.vmap` over requests.

    Args:
      log_probs: log-softmax of the drafter's logits for each position after the root; -inf forbids a token.
      budget: nodes without the root; fewer come back where fewer prefixes exist. The tree has budget + 1 rows.
      root: the token already sampled, which becomes row 0.
      keep_chain: take the chain of argmaxes first and spend what remains on the best other prefixes.

    Raises:
      ValueError: budget is negative.
    """
    k = max(1, min(budget, log_probs.shape[-1]))
    values, ids = lax.top_k(log_probs, k)
    return build_from_top_k(values, ids, budget, root=root, keep_chain=keep_chain)


def build_from_top_k(
    log_probs: Float[Array, "depth k"],
    ids: Int[Array, "depth k"],
    budget: int,
    *,
    root: Int[Array, ""] | int = 0,
    keep_chain: bool = False,
) -> DraftTree:
    """`build_tree` from each position's top k, sorted falling (see `top_log_probs`).

    The result is that of the whole vocabulary if k is at least min(budget, vocabulary).
    """
    return build_lattice(log_probs[:, None], ids, budget, root=root, keep_chain=keep_chain)


def build_lattice(
    log_probs: Float[Array, "depth parents k"],
    ids: Int[Array, "depth k"],
    budget: int,
    *,
    root: Int[Array, ""] | int = 0,
    keep_chain: bool = False,
) -> DraftTree:
    """The best `budget` prefixes of a lattice whose children's probabilities depend on the parent; exact within it.

    Args:
      log_probs: [d, i, j] is the log-probability of candidate j at position d after candidate i at position d - 1; at
        position 0 the root is the only parent and only i = 0 is read. With one parent the positions are independent.
      ids: the candidates of each position. With one parent they must be sorted by falling log-probability, otherwise
        their order only decides ties.
      budget: nodes without the root.
      root: the token already sampled.
      keep_chain: take the greedy chain (see `greedy_path`) first.

    Raises:
      ValueError: budget is negative.
    """
    if budget < 0:
        raise ValueError(f"budget is {budget}; a tree has 0 nodes (the root alone) or more")
    _, parents, k = log_probs.shape
    pairs = _dominated_pairs(budget, min(budget, k)) if parents == 1 else None
    return _grow(log_probs, ids, budget, root, keep_chain, pairs)


def greedy_path(
    log_probs: Float[Array, "depth parents k"], ids: Int[Array, "depth k"]
) -> tuple[Float[Array, " depth"], Int[Array, " depth"]]:
    """The best child of the best child of ... in a lattice: log-probabilities and tokens, as `chain` takes them."""

    def step(parent: Array, level: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        scores, tokens = level
        row = scores[jnp.minimum(parent, scores.shape[0] - 1)]
        best = jnp.argmax(row).astype(jnp.int32)
        return best, (row[best], tokens[best])

    return lax.scan(step, jnp.zeros((), jnp.int32), (log_probs, ids))[1]


def chain(
    log_probs: Float[Array, " depth"],
    ids: Int[Array, " depth"],
    budget: int | None = None,
    *,
    root: Int[Array, ""] | int = 0,
) -> DraftTree:
    """The tree that is one path: drafting as DFlash itself does it, cut after `budget` nodes if given."""
    depth = ids.shape[0] if budget is None else min(budget, ids.shape[0])
    at = jnp.arange(depth + 1)
    tree = DraftTree(
        tokens=jnp.concatenate([jnp.asarray(root, jnp.int32)[None], ids[:depth].astype(jnp.int32)]),
        parents=at - 1,
        depths=at,
        cum_log_probs=jnp.concatenate([jnp.zeros(1), jnp.cumsum(log_probs[:depth].astype(jnp.float32))]),
        ancestors=at[:, None] >= at,
        num_nodes=jnp.asarray(depth),
        max_depth=depth,
    )
    return tree if budget is None else resize(tree, budget + 1)


def truncate(tree: DraftTree, num_nodes: Int[Array, ""] | int) -> DraftTree:
    """The tree of the best `num_nodes` nodes: later rows become padding, shapes stay. One request; vmap for more."""
    rows = tree.tokens.shape[-1]
    keep = jnp.arange(rows) <= jnp.minimum(num_nodes, tree.num_nodes)
    return dataclasses.replace(
        tree,
        tokens=jnp.where(keep, tree.tokens, 0),
        parents=jnp.where(keep, tree.parents, -1),
        depths=jnp.where(keep, tree.depths, 0),
        cum_log_probs=jnp.where(keep, tree.cum_log_probs, -jnp.inf),
        ancestors=tree.ancestors & keep[:, None] & keep,
        num_nodes=jnp.minimum(tree.num_nodes, num_nodes),
    )


def resize(tree: DraftTree, rows: int) -> DraftTree:
    """The same tree in another static number of rows: the first of them, or padding added. Any leading batch."""
    have = tree.tokens.shape[-1]

    def fit(x: Array, dimensions: int, fill: Mapping[str, Any]) -> Array:
        x = x[(..., *(slice(rows),) * dimensions)]
        return jnp.pad(x, [(0, 0)] * (x.ndim - dimensions) + [(0, max(0, rows - have))] * dimensions, **fill)

    return dataclasses.replace(
        tree,
        tokens=fit(tree.tokens, 1, {}),
        parents=fit(tree.parents, 1, {"constant_values": -1}),
        depths=fit(tree.depths, 1, {}),
        cum_log_probs=fit(tree.cum_log_probs, 1, {"constant_values": -jnp.inf}),
        ancestors=fit(tree.ancestors, 2, {}),
        num_nodes=jnp.minimum(tree.num_nodes, rows - 1),
    )


def top_log_probs(
    logits: Float[Array, "*batch vocab_local"], k: int, axis: str = "tp"
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """Top k log-probabilities and token ids of logits whose vocabulary is sharded over a mesh axis.

    Each device sends its own top k and its log-sum-exp; the result is the same on all of them and equal to that of the
    whole vocabulary, ties included (the lower id first). Fewer than k come back from a smaller vocabulary.
    """
    logits = logits.astype(jnp.float32)
    local = logits.shape[-1]
    if k == 1:
        ids, values = (x[..., None] for x in largest(logits))
    else:
        values, ids = lax.top_k(logits, min(k, local))
    ids = ids + axis_index(axis) * local
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    last = logits.ndim - 1
    values, ids, total = (all_gather(x, axis, dimension=last) for x in (values, ids, total))
    values, order = lax.top_k(values, min(k, values.shape[-1]))
    return (values - jax.nn.logsumexp(total, axis=-1, keepdims=True), jnp.take_along_axis(ids, order, axis=-1))


def largest(x: Float[Array, "*batch n"]) -> tuple[Int[Array, "*batch"], Float[Array, "*batch"]]:
    """Index and value of each row's largest entry, the first of equals; the value is NaN where the row holds one.

    Two plain reductions, which XLA vectorises on a CPU; its argmax goes entry by entry, at ten times the cost.
    """
    best = x.max(axis=-1, keepdims=True)
    index = jnp.where(x == best, jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape[-1] - 1)
    return index.min(axis=-1), best[..., 0]


@functools.cache
def _dominated_pairs(budget: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (parent i, rank j) that can be among the best `budget`: (i+1)(j+1) pairs are at least as good."""
    i, j = np.divmod(np.arange(budget * k), max(k, 1))
    possible = (i + 1) * (j + 1) <= budget
    return i[possible].astype(np.int32), j[possible].astype(np.int32)


def _grow(
    log_probs: Float[Array, "depth parents k"],
    ids: Int[Array, "depth k"],
    budget: int,
    root: Int[Array, ""] | int,
    keep_chain: bool,
    pairs: tuple[np.ndarray, np.ndarray] | None,
) -> DraftTree:
    depth, parents, k = log_probs.shape
    log_probs = log_probs.astype(jnp.float32)
    log_probs = jnp.where(log_probs > IMPOSSIBLE, log_probs, IMPOSSIBLE)
    packing = _Packing.of(depth, k)
    zero = jnp.zeros(1, jnp.int32)
    frontier = start = _Prefixes((zero,) * keep_chain, jnp.zeros(1), jnp.zeros(1), (zero,) * packing.words)
    levels = []
    for d in range(1, depth + 1 if budget else 1):
        width = frontier.high.shape[0]
        if pairs is None:
            i, j = np.divmod(np.arange(width * k, dtype=np.int32), k)
        else:
            i, j = (table[pairs[0] < width] for table in pairs)
        parent = jax.tree.map(lambda x, i=i: x[i], frontier)
        row = packing.rank(parent.path, d - 1) if d > 1 and parents > 1 else 0
        high, low = _two_sum(parent.high, parent.low, -log_probs[d - 1][row, j])
        word, shift = packing.place(d)
        path = list(parent.path)
        path[word] = path[word] + ((j + 1) << shift)
        best_child = jnp.argmax(log_probs[d - 1], axis=-1)[row]
        off_chain = tuple(off | (j != best_child) for off in parent.off_chain)
        frontier = _first(_Prefixes(off_chain, high, low, tuple(path)), budget)
        levels.append(frontier)
    nodes, depths = start, np.zeros(1, np.int32)
    if levels:
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *levels)
        depths = np.repeat(np.arange(1, depth + 1, dtype=np.int32), [level.high.shape[0] for level in levels])
        chosen, depths = _first(joined, budget, depths)
        if keep_chain:
            chosen, depths = _first(chosen._replace(off_chain=()), budget, depths)
            start = start._replace(off_chain=())
        nodes = jax.tree.map(lambda *x: jnp.concatenate(x), start, chosen)
        depths = jnp.concatenate([zero, depths])
    real = nodes.high < -IMPOSSIBLE / 2

    key = jnp.stack(nodes.path, axis=-1) if packing.words else jnp.zeros((*nodes.high.shape, 0), jnp.int32)
    used = jnp.asarray(packing.masks(depth))[depths]
    ancestors = jnp.all(key[:, None, :] & used[None] == key[None], axis=-1) & real[:, None] & real
    is_parent = ancestors & (depths[None] == depths[:, None] - 1)
    found = jnp.where(is_parent.any(axis=-1), jnp.argmax(is_parent, axis=-1), -1)
    tokens = jnp.asarray(root, jnp.int32)
    for d in range(1, depth + 1):
        rank = jnp.maximum(packing.rank(nodes.path, d), 0)
        tokens = jnp.where(depths == d, ids[d - 1][rank].astype(jnp.int32), tokens)
    tree = DraftTree(
        tokens=jnp.where(real, tokens, 0),
        parents=found.astype(jnp.int32),
        depths=jnp.where(real, depths, 0),
        cum_log_probs=jnp.where(real, -(nodes.high + nodes.low), -jnp.inf),
        ancestors=ancestors,
        num_nodes=jnp.sum(real, dtype=jnp.int32) - 1,
        max_depth=depth,
    )
    return resize(tree, budget + 1)


def _first(prefixes: _Prefixes, count: int, *along: Array | np.ndarray) -> Any:
    """The first `count` by falling probability and path, a kept chain before the others; `along` goes along."""
    keys, tree = jax.tree.flatten(prefixes)
    ordered = [x[:count] for x in lax.sort((*keys, *map(jnp.asarray, along)), num_keys=len(keys), is_stable=False)]
    best = jax.tree.unflatten(tree, ordered[: len(keys)])
    return (best, *ordered[len(keys) :]) if along else best


def _two_sum(high: Array, low: Array, x: Array) -> tuple[Array, Array]:
    """(high + low) + x, again as the nearest float32 and the rest."""
    total = high + x
    virtual = total - high
    low = low + ((high - (total - virtual)) + (x - virtual))
    result = total + low
    return result, low - (result - total)
