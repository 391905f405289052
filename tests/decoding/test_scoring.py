"""Log-probabilities of given ids through the queue, against the reference's logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.decoding.engine import Draft
from kimi_jax.decoding.generate import Limits, Request
from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.scoring import SCORES, Window, strided
from kimi_jax.decoding.session import Session
from kimi_jax.serving import plan


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


def score(engine, windows, **options):
    return [scores for _, scores in sorted(engine.score(windows, **options), key=lambda pair: pair[0])]


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


def test_chunks_and_slots_change_nothing_and_greedy_texts_are_recognised(engines, reference):
    engine, ids = engines(), reference["input_ids"][0].tolist()
    text = []
    for progress in engine.serve([Request(ids[:20], Sampling(), 0, 9, stop_ids=())]):
        text += progress.new_tokens[0]
    windows = [Window([*ids[:20], *text][:-1], text), Window(ids[:-1], ids[1:]), Window(ids[:5], ids[3:6])]
    whole = score(engine, windows)
    assert whole[0].greedy.all()
    for got, same in zip(score(engine, windows, slots=1, limits=Limits(prefill_chunk=16)), whole, strict=True):
        np.testing.assert_allclose(got.logprobs, same.logprobs, atol=1e-5)
        assert (got.greedy == same.greedy).all()


def test_a_prompt_is_scored_beside_texts_that_go_on(engines, reference):
    """In mixed steps of draft trees, with the most likely tokens, and with an answer behind it."""
    engine, ids = engines(), tuple(reference["input_ids"][0].tolist())
    programs = engine.programs(Draft("ddtree", 7))
    shape = plan.Shape(1, 2, 12, 64, 4, 1, 16, programs.speculation.max_depth, (1, 2), until_one_ends=True, ahead=0)
    queue = Queue(Session(programs, engine.parameters, shape))
    queue.submit(plan.Request("text", ids[:9], 30, plan.Settings()))
    queue.submit(plan.Request("scored", ids, 2, plan.Settings(prompt_logprobs=5)))
    queue.submit(plan.Request("score", ids, 0, SCORES))
    pieces, texts = {"scored": {}, "score": {}, "text": {}}, {}
    while not queue.idle:
        for event, _ in queue.step():
            texts.setdefault(event.id, []).extend(event.tokens)
            if event.extra is not None:
                pieces[event.id][event.extra.start] = event.extra.scored
    assert len(texts["text"]) == 30
    assert len(texts["scored"]) == 2
    assert not pieces["text"]
    expected = log_softmax(reference["logits"][0])
    chosen = expected[np.arange(len(ids) - 1), list(ids[1:])]
    for id in ("scored", "score"):
        assert [*pieces[id]] == [*range(0, len(ids), 16)]
        told = np.concatenate([piece.logprobs for piece in pieces[id].values()])
        np.testing.assert_allclose(told, chosen, atol=1e-4)
    best = np.concatenate([piece.top.ids for piece in pieces["scored"].values()])
    logprobs = np.concatenate([piece.top.logprobs for piece in pieces["scored"].values()])
    ordered = np.sort(expected, axis=-1)[:-1, ::-1]
    np.testing.assert_allclose(logprobs, ordered[:, : logprobs.shape[1]], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(expected[:-1], best, axis=-1), logprobs, atol=1e-4)


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
    ("window", "message"),
    [
        (Window([1], [2, 3]), "window 1 has 2 targets for 1 rows"),
        (Window([1], []), "window 1 has 0 targets for 1 rows"),
        (Window([1, 2, 3], [4, 5]), "window 1: its targets are not the ids that follow its rows"),
        (Window([1, 2], [100_000]), "window 1 has an id outside 0"),
        (Window([1, 100_000], [2]), "prompt 1 has an id outside 0"),
    ],
)
def test_windows_that_make_no_sense_are_refused(engines, window, message):
    with pytest.raises(ValueError, match=message):
        score(engines(), [window])


def test_log_probabilities_that_are_not_finite_are_an_error(engines):
    engine = engines()
    target = {**engine.parameters["target"]}
    target["lm_head"] = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), target["lm_head"])
    broken = dataclasses.replace(engine, parameters=engine.parameters | {"target": target})
    with pytest.raises(ValueError, match="window 1, 2: log-probabilities are not finite"):
        score(broken, [Window([1, 2], [3]), Window([3, 2], [3])])


@pytest.mark.slow
def test_an_engine_whose_experts_move_scores_the_same(engines, reference):
    ids = reference["input_ids"][0].tolist()
    windows = [Window(ids[:-1], ids[1:]), Window(ids[:9], ids[5:10])]
    still, moving = (score(engine, windows) for engine in (engines("hgx-ib-16"), engines("hgx-ib-16").rebalancing(4)))
    for got, expected in zip(moving, still, strict=True):
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
