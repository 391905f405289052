import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model.rows import causal_rows
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parameters import bind
from kimi_jax.training import data, target
from kimi_jax.training.export import dequantize_experts, quantize_experts
from kimi_jax.training.recipes import shard_state, training_mesh
from meshes.presets import Layout

RECIPE = target.TargetRecipe(steps=6, learning_rate=1e-2, warmup_steps=1)


@pytest.fixture(scope="module")
def parameters(tiny_config):
    return target.initial_parameters(target.training_model(tiny_config), jax.random.key(0), 2)


@pytest.fixture(scope="module")
def batch(tokenizer):
    return data.training_batch(tokenizer, 0, 0, sequences=4, length=96, answers=64)


def test_training_model_is_the_inference_model(tiny_config, parameters, batch):
    """Same logits from INT4 weights in the inference model and from their values in the training model.

    1e-4: float32, experts summed in another order. `capacity_factor` 2 is experts / top_k here: nothing is dropped.
    """
    quantized = quantize_experts(parameters, tiny_config)
    rows = batch.rows()

    def logits(model, weights):
        @jax.jit
        def run(weights):
            bound = bind(model, weights)
            return bound.logits(bound.model(rows, expanded=True).hidden)

        return run(weights)

    expected = logits(CausalLM(tiny_config), quantized)
    actual = logits(target.training_model(tiny_config, 2.0), dequantize_experts(quantized))
    real = np.asarray(batch.documents) > 0
    np.testing.assert_allclose(np.asarray(actual)[real], np.asarray(expected)[real], atol=1e-4)
    assert np.abs(np.asarray(expected)[real]).max() > 0.5


def test_packed_chats_do_not_see_each_other(tiny_config, parameters, batch):
    model = target.training_model(tiny_config, 2.0)

    @jax.jit
    def hidden(parameters, rows):
        return bind(model, parameters).model(rows).hidden

    packed = hidden(parameters, batch.rows())
    where = np.flatnonzero(np.asarray(batch.documents)[1] == 2)
    alone = causal_rows(batch.tokens[1:2, where], jnp.zeros(1, jnp.int32), jnp.asarray([len(where)]))
    single = hidden(parameters, alone)
    np.testing.assert_allclose(packed[1, where], single[0], atol=2e-5)


def test_loss_is_the_cross_entropy_of_the_answers(tiny_config, parameters, batch):
    """Against log-probabilities of every row, picked one by one."""
    model = target.training_model(tiny_config, 2.0)
    total, sums = jax.jit(functools.partial(target.answer_loss, model))(parameters, batch)

    @jax.jit
    def every_loss(parameters):
        bound = bind(model, parameters)
        return jax.nn.log_softmax(bound.logits(bound.model(batch.rows()).hidden))

    log_probs = np.asarray(every_loss(parameters))
    expected = 0.0
    for row in range(4):
        for i in np.flatnonzero(batch.weights[row]):
            expected -= log_probs[row, batch.predictors[row, i], batch.targets[row, i]]
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert float(sums.tokens) == np.asarray(batch.weights).sum()


def test_full_experts_drop_rows_and_padding_takes_no_place(tiny_config, parameters):
    experts = target.FloatExperts(tiny_config, 4, capacity_factor=0.5)
    weights = parameters["model"]["layers"][1]["mlp"]["experts"]
    x = jax.random.normal(jax.random.key(1), (8, 32))
    slots = jnp.asarray([[4, 4]] * 4 + [[0, 1]] * 4)  # the first four rows are padding
    gates = jnp.ones((8, 2))
    out = bind(experts, weights)(x, slots, gates)
    exact = bind(target.FloatExperts(tiny_config, 4, capacity_factor=4.0), weights)(x, slots, gates)
    # 0.5 · 8 rows · 2 / 4 experts = 2 places.
    np.testing.assert_allclose(out[4:6], exact[4:6], atol=1e-6)
    assert (np.asarray(out[:4]) == 0).all()
    assert (np.asarray(out[6:]) == 0).all()
    assert np.abs(exact[6:]).max() > 1e-3


def test_bias_falls_for_overloaded_experts(tiny_config, parameters, batch):
    """All rows prefer experts 0 and 1: their bias falls, the others' rises, each by the rate."""
    skewed = jax.tree.map(lambda x: x, parameters)
    bias = jnp.asarray([5.0, 5.0, 0.0, 0.0])
    skewed["model"]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"] = bias
    step = jax.jit(
        functools.partial(target.train_step, target.training_model(tiny_config), RECIPE, training_mesh(Layout()))
    )
    state = target.initial_state(skewed, RECIPE)
    state, _ = step(state, batch)  # warm-up: the rate is 0
    unmoved = state.parameters["model"]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"]
    np.testing.assert_array_equal(unmoved, bias)
    state, metrics = step(state, batch)
    moved = state.parameters["model"]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"]
    np.testing.assert_allclose(moved - bias, [-0.01, -0.01, 0.01, 0.01], atol=1e-6)
    assert float(metrics["worst_load"]) == pytest.approx(2.0)


LAYOUTS = [
    Layout(ep=2, tp=2),
    pytest.param(Layout(dp=2), marks=pytest.mark.slow),
    pytest.param(Layout(tp=2), marks=pytest.mark.slow),
    pytest.param(Layout(dp=2, ep=2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def train(tiny_config, tokenizer, parameters):
    """Four steps on a layout: the state and the losses."""

    @functools.cache
    def train(layout):
        model, mesh = target.training_model(tiny_config, 2.0), training_mesh(layout)
        state = shard_state(target.initial_state(parameters, RECIPE), model, mesh, layout)
        step = jax.jit(functools.partial(target.train_step, model, RECIPE, mesh))
        losses = []
        for index in range(4):
            made = data.training_batch(tokenizer, 0, index, sequences=4, length=96, answers=64)
            state, metrics = step(state, made)
            losses.append(float(metrics["loss"]))
        return state, losses

    return train


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sharded_training_is_the_same_training(train, parameters, layout):
    """Loss and weights after four steps as on one device. dp ranks hold their own expert places, so none is dropped.

    Weights by their mean: AdamW's first steps have the size of the learning rate whatever the gradient, so an element
    whose gradient is all rounding error may go either way.
    """
    expected, expected_losses = train(Layout())
    actual, losses = train(layout)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert losses[-1] < losses[0] - 0.3
    head = actual.parameters["lm_head"]["weight"]
    assert len({str(shard.index) for shard in head.addressable_shards}) == layout.tp
    moved = np.abs(np.asarray(head) - np.asarray(parameters["lm_head"]["weight"])).mean()
    wrong = np.abs(np.asarray(head) - np.asarray(expected.parameters["lm_head"]["weight"])).mean()
    assert wrong < 0.01 * moved
