"""What routing a trained model really does: how popular experts are, and how many of them a draft tree's rows touch.

The estimator assumes that rows pick experts independently. Rows of one draft tree are alternatives for the same few
positions of one text, so they agree more often; `measure` counts how much more.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kimi_jax.ddtree.tree import build_tree
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.model.moe import MixtureOfExperts
from kimi_jax.model.rows import Rows, uncached_rows
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parameters import Parameters, bind
from kimi_jax.training.data import Chat
from kimi_jax.training.drafter import AnchoredTexts, anchored_texts, block_logits


@dataclasses.dataclass(frozen=True)
class Distinct:
    """Different experts that n rows touch in a layer, averaged over layers and samples."""

    rows: int
    tree: float
    """The best n rows of a draft tree, the root included."""
    independent: float
    """n rows from different texts."""
    uniform: float
    """E · (1 - (1 - k/E)^n): independent rows, all experts alike."""


@dataclasses.dataclass(frozen=True)
class RoutingStatistics:
    """Measured on held-out texts."""

    counts: list[list[int]]
    """Rows that chose each expert, by layer: what `ledger.routing.from_file` reads."""
    distinct: list[Distinct]
    tree_diversity: float
    """Share of a tree's rows that count as independent, fitted to `distinct` by least squares."""
    trees: int

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return dataclasses.asdict(self)


def chosen_experts(target: CausalLM, parameters: Parameters, rows: Rows) -> Int[Array, "layers requests rows top_k"]:
    """Experts every row chose in every layer that has some; a padding row's are past the last."""
    bound = bind(target, parameters)
    bound.model(rows, expanded=True)
    return jnp.stack(
        [
            layer.mlp.experts.chosen.get_value().reshape(*rows.tokens.shape, -1)  # pyright: ignore[reportAttributeAccessIssue]
            for layer in bound.model.layers
            if isinstance(layer.mlp, MixtureOfExperts)
        ]
    )


def tree_rows(texts: AnchoredTexts, logits: Int[Array, "texts 1 depth vocab"], budget: int) -> Rows:
    """Each text up to its anchor, and behind it the draft tree of the anchor's block; one anchor a text."""
    anchors = texts.anchors[:, 0]
    roots = jnp.take_along_axis(texts.tokens, anchors[:, None], axis=1)[:, 0]
    log_probs = jax.nn.log_softmax(logits[:, 0])
    trees = jax.vmap(lambda table, root: build_tree(table, budget, root=root))(log_probs, roots)
    length, nodes = texts.tokens.shape[1], budget + 1
    index = jnp.arange(length)
    context = (index[:, None] >= index) & (index < anchors[:, None, None])
    context &= (index < anchors[:, None])[:, :, None]
    sees = (index < anchors[:, None])[:, None, :] & jnp.diagonal(trees.ancestors, axis1=1, axis2=2)[:, :, None]
    top = jnp.concatenate([context, jnp.zeros((*anchors.shape, length, nodes), bool)], axis=2)
    ancestors = jnp.concatenate([top, jnp.concatenate([sees, trees.ancestors], axis=2)], axis=1)
    tokens = jnp.concatenate([texts.tokens, trees.tokens], axis=1)
    positions = jnp.concatenate([jnp.broadcast_to(index, texts.tokens.shape), anchors[:, None] + trees.depths], axis=1)
    return uncached_rows(tokens, positions, ancestors)


def count_distinct(chosen: Int[np.ndarray, "... rows top_k"], experts: int) -> Int[np.ndarray, "..."]:
    """Different experts among all rows; ids past the last are not counted."""
    touched = np.zeros((*chosen.shape[:-2], experts + 1), bool)
    flat = np.minimum(chosen.reshape(*chosen.shape[:-2], -1), experts)
    np.put_along_axis(touched, flat, True, axis=-1)
    return touched[..., :experts].sum(-1)


def measure(
    target: CausalLM,
    drafter: DFlash,
    parameters: Parameters,
    drafter_parameters: Parameters,
    chats: Sequence[Chat],
    row_counts: Sequence[int] = (1, 2, 4, 8, 16, 24, 32),
    *,
    length: int = 96,
    batch: int = 50,
    seed: int = 0,
) -> RoutingStatistics:
    """Runs the texts, and for each one tree at a random place of its answer.

    Args:
      target: a training model (its experts remember what was chosen) that drops nothing.
      drafter: its drafter.
      parameters: the target's, experts as floats.
      drafter_parameters: the drafter's.
      chats: texts; a multiple of `batch` of them is used.
      row_counts: rows of a tree, the root included; trees have the largest.
      length, batch: shape of a forward.
      seed: of the places.
    """
    config, rng, budget = target.config, np.random.default_rng(seed), max(row_counts) - 1
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok

    @jax.jit
    def run(parameters: Parameters, drafter_parameters: Parameters, texts: AnchoredTexts):
        logits = block_logits(bind(drafter, drafter_parameters), bind(target, parameters), texts)
        return chosen_experts(target, parameters, tree_rows(texts, logits, budget))

    @functools.partial(jax.jit)
    def run_texts(parameters: Parameters, texts: AnchoredTexts):
        index = jnp.arange(length)
        real = index < texts.lengths[:, None]
        ancestors = (index[:, None] >= index) & real[:, :, None]
        positions = jnp.broadcast_to(index, texts.tokens.shape)
        return chosen_experts(target, parameters, uncached_rows(texts.tokens, positions, ancestors))

    in_trees, in_texts, lengths = [], [], []
    for first in range(0, len(chats) - batch + 1, batch):
        texts = anchored_texts(chats[first : first + batch], rng, length=length, anchors=1)
        in_trees.append(np.asarray(run(parameters, drafter_parameters, texts))[:, :, length:])
        in_texts.append(np.asarray(run_texts(parameters, texts)))
        lengths.append(np.asarray(texts.lengths))
    trees, whole = np.concatenate(in_trees, axis=1), np.concatenate(in_texts, axis=1)
    counts = [np.bincount(layer[layer < experts], minlength=experts).tolist() for layer in whole]

    # Independent rows: one row from a random place of each text, n texts together.
    places = rng.integers(0, np.concatenate(lengths), size=(200, whole.shape[1]))
    distinct = []
    for rows in row_counts:
        samples = []
        for place in places:
            rows_of = rng.permutation(whole.shape[1])[:rows]
            samples.append(count_distinct(whole[:, rows_of, place[rows_of]], experts).mean())
        uniform = experts * (1 - (1 - top_k / experts) ** rows)
        tree = float(count_distinct(trees[:, :, :rows], experts).mean())
        distinct.append(Distinct(rows, tree, float(np.mean(samples)), uniform))
    return RoutingStatistics(counts, distinct, fit_diversity(counts, distinct, top_k), trees.shape[1])


def fit_diversity(counts: Sequence[Sequence[int]], distinct: Sequence[Distinct], top_k: int) -> float:
    """Diversity d in 0..1 with which Σ 1 - (1 - p)^(1 + d (n - 1)) over experts comes nearest to the trees' counts."""
    popularity = np.asarray(counts, float)
    popularity = np.minimum(1.0, popularity * top_k / popularity.sum(1, keepdims=True))

    def error(diversity: float) -> float:
        total = 0.0
        for entry in distinct:
            effective = 1 + diversity * (entry.rows - 1)
            expected = (1 - (1 - popularity) ** effective).sum(1).mean()
            total += (expected - entry.tree) ** 2
        return total

    grid = np.linspace(0, 1, 1001)
    return float(grid[np.argmin([error(d) for d in grid])])
