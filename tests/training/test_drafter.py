import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.context import empty_context, write
from kimi_jax.drafter.dflash import DFlash, stack_taps
from kimi_jax.drafter.loss import DraftLoss
from kimi_jax.model.rows import causal_rows
from kimi_jax.parameters import bind
from kimi_jax.training import small, target
from kimi_jax.training.data import Chat
from kimi_jax.training.drafter import anchored_texts, block_labels, block_logits, chain_rounds, draft_step
from kimi_jax.training.recipes import training_mesh
from meshes.presets import Layout

LENGTH = 24


@pytest.fixture(scope="module")
def models(tiny_config, tokenizer):
    raw = small.drafter_config_dict(
        tiny_config, tokenizer.special_id("[UNK]"), num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=32, block_size=4,
    )  # fmt: skip
    raw["dflash_config"]["target_layer_ids"] = [0, 1]
    config = DrafterConfig.from_dict(raw)
    model, drafter = target.training_model(tiny_config, 2.0), DFlash(config)
    key = jax.random.key(0)
    return model, drafter, target.initial_parameters(model, key, 2), target.initial_parameters(drafter, key, 2)


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    chats = [Chat(rng.integers(0, 200, size).tolist(), 6) for size in (20, 12)]
    return anchored_texts(chats, rng, length=LENGTH, anchors=5)


def test_anchors_lie_in_the_answer_and_have_something_behind_them(texts):
    rng = np.random.default_rng(1)
    chats = [Chat(list(range(20)), 15)] * 200
    anchors = np.asarray(anchored_texts(chats, rng, length=LENGTH, anchors=3).anchors)
    assert set(np.unique(anchors)) == {15, 16, 17, 18}
    assert all(len(set(row)) == 3 for row in anchors)
    counts = np.bincount(anchors.ravel())[15:]
    assert counts.min() > 110  # uniform: 150 each, deviation 6.1
    few = np.asarray(anchored_texts(chats[:1], rng, length=LENGTH, anchors=6).anchors)
    assert few.tolist() == [[15, 16, 17, 18, -1, -1]]
    with pytest.raises(ValueError, match="20 ids exceeds the length 19"):
        anchored_texts(chats[:1], rng, length=19, anchors=2)


def test_labels_are_what_stands_behind_the_anchor(texts):
    labels, remaining = block_labels(texts, 3)
    tokens, lengths, anchors = (np.asarray(x) for x in (texts.tokens, texts.lengths, texts.anchors))
    for row in range(2):
        for i, anchor in enumerate(anchors[row]):
            rest = tokens[row, anchor + 1 : lengths[row]]
            assert int(remaining[row, i]) == len(rest) > 0
            known = min(3, len(rest))
            assert np.asarray(labels)[row, i, :known].tolist() == rest[:known].tolist()


def test_training_blocks_are_the_decoder_s_blocks(models, texts):
    """Every anchor's logits as decoding gets them: the prefix alone is run, its taps extend a context, one draft.

    5e-5: float32, the same numbers summed in another order. The text behind the anchor is not in the prefix, so this
    also shows that a block sees nothing at or behind its anchor but its own tokens.
    """
    model, drafter, weights, drafter_weights = models
    trained = jax.jit(
        lambda d, t: block_logits(bind(drafter, d), bind(model, t), texts)
    )(drafter_weights, weights)  # fmt: skip

    @functools.partial(jax.jit, static_argnums=2)
    def decoded(row, anchor_token, start):
        bound, bound_drafter = bind(model, weights), bind(drafter, drafter_weights)
        zero, count = jnp.zeros(1, jnp.int32), jnp.full(1, start)
        prefix = texts.tokens[row, :start][None]
        output = bound.model(causal_rows(prefix, zero, count), None, drafter.config.target_layer_ids)
        context = empty_context(dataclasses.replace(drafter.config, draft_window=32), 1, jnp.float32)
        context = write(context, bound_drafter.context_rows(stack_taps(output.taps), zero), zero, count)
        hidden = bound_drafter.draft(context, anchor_token[None], count, bound.model.embed_tokens)
        return bound_drafter.logits(hidden, bound.lm_head)[0]

    for row, i in ((0, 0), (0, 4), (1, 1)):
        start = int(texts.anchors[row, i])
        expected = decoded(row, texts.tokens[row, start], start)
        np.testing.assert_allclose(trained[row, i], expected, atol=5e-5)
        assert np.abs(np.asarray(expected)).max() > 0.5


def test_steps_lower_the_loss_and_leave_the_target_alone(models, texts):
    model, drafter, weights, drafter_weights = models
    recipe = target.Recipe(steps=30, learning_rate=1e-2, warmup_steps=2)
    state = target.initial_state(drafter_weights, recipe)
    step = jax.jit(functools.partial(draft_step, drafter, model, recipe, DraftLoss(), training_mesh(Layout())))
    before = jax.tree.map(np.asarray, weights)
    history = []
    for _ in range(30):
        state, metrics = step(weights, state, texts)
        history.append({name: float(value) for name, value in metrics.items()})
    assert history[-1]["loss"] < 0.3 * history[0]["loss"]
    assert history[-1]["acceptance"] > history[0]["acceptance"] + 0.5
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == np.asarray(b)).all(), before, weights))


@pytest.mark.slow
def test_drafting_on_two_ranks_is_the_same_step(models, texts):
    model, drafter, weights, drafter_weights = models
    recipe = target.Recipe(steps=3, learning_rate=1e-2, warmup_steps=1)
    results = []
    for layout in (Layout(), Layout(dp=2)):
        state = target.initial_state(drafter_weights, recipe)
        step = jax.jit(functools.partial(draft_step, drafter, model, recipe, DraftLoss(), training_mesh(layout)))
        metrics = {}
        for _ in range(2):
            state, metrics = step(weights, state, texts)
        results.append([float(metrics[name]) for name in ("loss", "acceptance", "gradient_norm")])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)


def test_chain_rounds_by_hand():
    """Text 0..9 from anchor 3: drafts right, wrong at the second, then cut by the end of the text."""
    text = list(range(10))
    drafted = np.zeros((10, 3), int)
    drafted[3] = [4, 5, 6]  # all right: 4, 5, 6 and the target's 7
    drafted[7] = [8, 0, 0]  # one right: 8 and the target's 9
    assert chain_rounds(drafted, text, 3) == [4, 2]
    drafted[3] = [0, 5, 6]  # none right: the target's 4
    drafted[4] = [5, 6, 7]
    drafted[8] = [9, 0, 0]  # the last token is a draft: nothing follows it
    assert chain_rounds(drafted, text, 3) == [1, 4, 1]
