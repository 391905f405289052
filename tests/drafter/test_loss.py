import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.drafter.loss import DraftLoss, accepted_lengths


def logits_giving(probabilities, vocab=4):
    """Logits [depth, vocab] under which token 0 has these probabilities."""
    rows = [[p] + [(1 - p) / (vocab - 1)] * (vocab - 1) for p in probabilities]
    return jnp.log(jnp.asarray(rows))


def test_decay_weights_and_normaliser():
    """Cross-entropies -ln p, weights e^(-k/4), the masked position out of both sums."""
    probabilities = [0.5, 0.25, 0.8]
    total, weights = DraftLoss(gamma=4.0)(
        logits_giving(probabilities), jnp.zeros(3, jnp.int32), jnp.asarray([True, True, False])
    )
    assert float(weights) == pytest.approx(1 + math.exp(-0.25), rel=1e-6)
    assert float(total) == pytest.approx(math.log(2) + math.exp(-0.25) * math.log(4), rel=1e-5)


def test_d_pace_weights_are_the_expected_rest_of_the_prefix():
    """By hand: s = (1 - α) q + α, weight of k = Σ over i >= k of s_1 … s_i."""
    q, alpha = [0.6, 0.2, 0.9], 0.5
    s = [(1 - alpha) * p + alpha for p in q]
    prefix = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    expected = [sum(prefix), sum(prefix[1:]), prefix[2]]
    loss = DraftLoss("d-pace", alpha=alpha)
    mask = jnp.ones(3, bool)
    np.testing.assert_allclose(loss.weights(-jnp.log(jnp.asarray(q)), mask), expected, rtol=1e-6)
    total, weights = loss(logits_giving(q), jnp.zeros(3, jnp.int32), mask)
    assert float(weights) == pytest.approx(sum(expected), rel=1e-5)
    assert float(total) == pytest.approx(-sum(w * math.log(p) for w, p in zip(expected, q, strict=True)), rel=1e-5)


def test_d_pace_weights_are_constants_and_end_with_the_text():
    loss = DraftLoss("d-pace")
    logits, labels = logits_giving([0.6, 0.2, 0.9]), jnp.zeros(3, jnp.int32)
    cut = jnp.asarray([True, True, False])
    short = loss(logits[:2], labels[:2], jnp.ones(2, bool))
    np.testing.assert_allclose(loss(logits, labels, cut), short, rtol=1e-6)
    gradient = jax.grad(lambda x: loss(x, labels, cut)[0])(logits)
    weights = loss.weights(-jax.nn.log_softmax(logits)[:, 0], cut)
    expected = weights[:, None] * (jax.nn.softmax(logits) - jax.nn.one_hot(labels, 4))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert (np.asarray(gradient[2]) == 0).all()


@pytest.mark.parametrize("changes", [{"kind": "kl"}, {"gamma": 0.0}, {"alpha": 1.5}])
def test_bad_settings_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        DraftLoss(**changes)


@pytest.mark.parametrize(
    ("drafted", "remaining", "emitted"),
    [
        ([1, 2, 3, 4], 9, 5),  # all right, and a bonus token
        ([1, 2, 3, 4], 4, 4),  # all right, and the text ends with them
        ([1, 2, 9, 4], 9, 3),  # what is right behind a wrong one does not count
        ([9, 2, 3, 4], 9, 1),
        ([1, 2, 3, 4], 2, 2),  # labels behind the end are none
        ([1, 2, 3, 4], 0, 0),  # no anchor
    ],
)
def test_accepted_lengths(drafted, remaining, emitted):
    labels = jnp.asarray([1, 2, 3, 4])
    assert int(accepted_lengths(jnp.asarray(drafted), labels, jnp.int32(remaining))) == emitted
