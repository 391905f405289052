"""Scores of given ids against the reference's logits, on several meshes and in chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.decoding import forcing
from kimi_jax.decoding.forcing import Window, force, logits_of, score, strided

pytestmark = pytest.mark.core


def log_softmax(values):
    values = values.astype(np.float64)
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def windows_of(reference):
    """The reference's sequences, cut to different lengths, with different numbers of targets."""
    ids = reference["input_ids"].tolist()
    length = len(ids[0])
    cuts = [(0, length - 1, length - 1), (1, length // 2, 3)]
    return [(row, Window(ids[row][:end], ids[row][end - scored + 1 : end + 1])) for row, end, scored in cuts]


@pytest.mark.parametrize("mesh", ["local", "hgx-ib-16"])
def test_scores_are_the_references(engines, reference, mesh):
    cases = windows_of(reference)
    scores = score(engines(mesh), [window for _, window in cases])
    for (row, window), got in zip(cases, scores, strict=True):
        end, scored = len(window.inputs), len(window.targets)
        expected = log_softmax(reference["logits"][row, end - scored : end])
        chosen = expected[np.arange(scored), window.targets]
        np.testing.assert_allclose(got.logprobs, chosen, atol=1e-4)
        assert (got.greedy == (expected.argmax(-1) == window.targets)).all()
        assert not got.greedy.all()


def test_greedy_targets_are_recognised(engines, reference):
    ids = reference["input_ids"][0].tolist()
    best = reference["logits"][0].argmax(-1).tolist()
    (scores,) = score(engines("local"), [Window(ids, best)], requests=2)
    assert scores.greedy.all()


def test_chunks_see_what_came_before_and_share_a_step(engines, reference):
    engine, ids = engines("local"), reference["input_ids"].tolist()
    chunks = list(force(engine, logits_of, [ids[0], ids[1][:7]], chunk=16))
    assert len(chunks) == -(-len(ids[0]) // 16) > 1
    assert [chunk.counts[1] for chunk in chunks] == [7] + [0] * (len(chunks) - 1)
    whole = np.concatenate([chunk.values[0, : chunk.counts[0]] for chunk in chunks])
    np.testing.assert_allclose(whole, reference["logits"][0], atol=1e-4)
    np.testing.assert_allclose(chunks[0].values[1, :7], reference["logits"][1, :7], atol=1e-4)
    step = forcing._step(engine.model, engine.mesh, tuple(engine.rules.items()), logits_of, ())
    compiled = step._cache_size()
    list(force(engine, logits_of, [ids[0], ids[1]], chunk=16))
    assert step._cache_size() == compiled


@pytest.mark.parametrize(
    ("ids", "length", "stride", "expected"),
    [
        ("abcde", 8, 8, [("abcd", "bcde")]),
        ("abcde", 2, 2, [("ab", "bc"), ("cd", "de")]),
        ("abcdef", 2, 2, [("ab", "bc"), ("cd", "de"), ("de", "f")]),
        ("abcdef", 3, 1, [("abc", "bcd"), ("bcd", "e"), ("cde", "f")]),
        ("ab", 1, 1, [("a", "b")]),
        ("a", 4, 2, []),
    ],
)
def test_windows_predict_every_id_but_the_first_once(ids, length, stride, expected):
    windows = list(strided([ord(c) for c in ids], length, stride))
    assert [("".join(map(chr, w.inputs)), "".join(map(chr, w.targets))) for w in windows] == expected


@pytest.mark.parametrize("stride", [0, 5])
def test_a_stride_beyond_the_window_is_refused(stride):
    with pytest.raises(ValueError, match=rf"stride is {stride}; it must lie in 1..4"):
        list(strided([1, 2, 3], 4, stride))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [([[1], []], "sequence 2 has 0 tokens"), ([[1, -2]], "outside 0"), (None, "the model takes 1 to")],
)
def test_what_cannot_be_run_is_refused(engines, inputs, message):
    inputs = inputs or [[1] * (engines("local").config.max_position_embeddings + 1)]
    with pytest.raises(ValueError, match=message):
        list(force(engines("local"), logits_of, inputs))


def test_log_probabilities_that_are_not_finite_are_an_error(engines, reference):
    engine = engines("local")
    target = {**engine.parameters["target"]}
    target["lm_head"] = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), target["lm_head"])
    broken = dataclasses.replace(engine, parameters={"target": target})
    with pytest.raises(ValueError, match="window 1: log-probabilities are not finite"):
        score(broken, [Window([1, 2], [3])], requests=2, length=32)


def test_an_engine_whose_experts_move_is_refused(engines):
    with pytest.raises(ValueError, match="experts of this engine move"):
        score(engines("hgx-ib-16").rebalancing(4), [Window([1, 2], [2, 3])])
