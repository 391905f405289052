"""Training of a DFlash drafter on a frozen target: many anchors a text, all blocks in one forward."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kimi_jax.drafter.context import LayerContext
from kimi_jax.drafter.dflash import DFlash, stack_taps
from kimi_jax.drafter.loss import DraftLoss, accepted_lengths
from kimi_jax.model.rows import causal_rows
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parameters import Parameters, bind
from kimi_jax.training.data import Chat
from kimi_jax.training.target import Recipe, TrainState, over_dp, updated


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnchoredTexts:
    """One text a row, with the anchors whose blocks are trained."""

    tokens: Int[Array, "texts length"]
    lengths: Int[Array, " texts"]
    """Ids of each text, its stop token included."""
    anchors: Int[Array, "texts anchors"]
    """Positions; a block's labels are the tokens behind its anchor. -1 where a text has fewer."""


def anchored_texts(chats: Sequence[Chat], rng: np.random.Generator, *, length: int, anchors: int) -> AnchoredTexts:
    """Draws distinct anchors among each text's answer tokens, the last of which has nothing behind it.

    Raises:
      ValueError: a text is longer than `length`.
    """
    tokens = np.zeros((len(chats), length), np.int32)
    chosen = np.full((len(chats), anchors), -1, np.int32)
    for row, chat in enumerate(chats):
        if len(chat.ids) > length:
            raise ValueError(f"a text of {len(chat.ids)} ids exceeds the length {length}; raise it")
        tokens[row, : len(chat.ids)] = chat.ids
        positions = rng.permutation(np.arange(chat.answer_start, len(chat.ids) - 1))[:anchors]
        chosen[row, : len(positions)] = np.sort(positions)
    lengths = np.asarray([len(chat.ids) for chat in chats], np.int32)
    return AnchoredTexts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(chosen))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftSums:
    """What the texts of one dp rank add to a step's figures."""

    weights: Float[Array, ""]
    blocks: Float[Array, ""]
    accepted: Float[Array, ""]
    """Tokens a chain would emit, over all blocks."""


def block_logits(drafter: DFlash, target: CausalLM, texts: AnchoredTexts) -> Float[Array, "texts anchors depth vocab"]:
    """The drafter's logits for every anchor's block, from the target's taps of the whole texts.

    Both modules are bound. A block sees the context before its anchor, strictly, and itself: blocks are requests of
    their own to the drafter, which share the text's keys and values.
    """
    config = drafter.config
    rows, length = texts.tokens.shape
    anchors = texts.anchors.shape[1]
    zeros = jnp.zeros(rows, jnp.int32)
    output = target.model(
        causal_rows(texts.tokens, zeros, texts.lengths), tap_layers=config.target_layer_ids, expanded=True
    )
    fused = drafter.fuse(jax.lax.stop_gradient(stack_taps(output.taps)))
    turn = drafter.turn(zeros, length)  # the positions of a text from its start
    start = jnp.maximum(texts.anchors, 0)

    def shared(x: Float[Array, "texts heads length dim"]) -> Float[Array, "blocks heads length dim"]:
        return jnp.repeat(x, anchors, axis=0)

    context = [LayerContext(*map(shared, layer.self_attn.keys_and_values(fused, turn))) for layer in drafter.layers]
    anchor_tokens = jnp.take_along_axis(texts.tokens, start, axis=1)
    hidden = drafter.draft(context, anchor_tokens.reshape(-1), start.reshape(-1), target.model.embed_tokens)
    logits = drafter.logits(hidden, target.logits)
    return logits.reshape(rows, anchors, *logits.shape[1:])


def block_labels(
    texts: AnchoredTexts, depth: int
) -> tuple[Int[Array, "texts anchors depth"], Int[Array, "texts anchors"]]:
    """Tokens behind each anchor, and how many of the text there are (0 where there is no anchor)."""
    start = jnp.maximum(texts.anchors, 0)
    index = start[..., None] + 1 + jnp.arange(depth)
    inside = jnp.minimum(index, texts.tokens.shape[1] - 1)
    labels = jnp.take_along_axis(texts.tokens[:, None], inside, axis=2)
    remaining = jnp.where(texts.anchors >= 0, texts.lengths[:, None] - 1 - start, 0)
    return labels, remaining


def draft_loss(
    drafter: DFlash, target: CausalLM, loss: DraftLoss, parameters: Parameters, frozen: Parameters,
    texts: AnchoredTexts,
) -> tuple[Float[Array, ""], DraftSums]:  # fmt: skip
    """Weighted sum of the blocks' cross-entropies, and what goes with it."""
    logits = block_logits(bind(drafter, parameters), bind(target, frozen), texts)
    labels, remaining = block_labels(texts, logits.shape[2])
    mask = jnp.arange(labels.shape[-1]) < remaining[..., None]
    total, weights = loss(logits, labels, mask)
    accepted = accepted_lengths(logits.argmax(-1), labels, remaining)
    return total, DraftSums(weights, (remaining > 0).sum().astype(jnp.float32), accepted.sum().astype(jnp.float32))


def draft_step(
    drafter: DFlash, target: CausalLM, recipe: Recipe, loss: DraftLoss, mesh: Mesh, frozen: Parameters,
    state: TrainState, texts: AnchoredTexts,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:  # fmt: skip
    """One update of the drafter; the target, its embedding and its head stay as they are."""

    def gradient(
        weights: tuple[Parameters, Parameters], texts: AnchoredTexts
    ) -> tuple[tuple[Array, DraftSums], Parameters]:
        parameters, frozen = weights
        loss_of = functools.partial(draft_loss, drafter, target, loss)
        return jax.value_and_grad(loss_of, has_aux=True)(parameters, frozen, texts)

    (total, sums), gradients = over_dp(mesh, gradient, (state.parameters, frozen), texts)
    count = jnp.maximum(sums.weights, 1e-6)
    state, gradient_norm = updated(state, recipe, gradients, count)
    acceptance = sums.accepted / jnp.maximum(sums.blocks, 1)
    return state, {"loss": total / count, "acceptance": acceptance, "gradient_norm": gradient_norm}


def chain_rounds(drafted: Int[np.ndarray, "anchors depth"], text: Sequence[int], first_anchor: int) -> list[int]:
    """Tokens of each round when a chain drafter decodes `text` from its anchor at `first_anchor` to its end.

    `drafted[t]` are the drafts of the block whose anchor stands at position t.
    """
    rounds, anchor = [], first_anchor
    while anchor < len(text) - 1:
        labels = text[anchor + 1 :]
        matched = 0
        while matched < min(drafted.shape[1], len(labels)) and drafted[anchor][matched] == labels[matched]:
            matched += 1
        rounds.append(min(matched + 1, len(labels)))
        anchor += rounds[-1]
    return rounds
