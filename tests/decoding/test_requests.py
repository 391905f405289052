"""Requests with limits, seeds and sampling of their own get the text that they get alone."""

import pytest

from kimi_jax.decoding.generate import Limits, Request
from kimi_jax.decoding.report import Report
from kimi_jax.decoding.sampling import Sampling

WARM = Sampling(temperature=1.0)
REQUESTS = [
    Request([5, 6, 7], Sampling(), 0, 6),
    Request([8, 9], WARM, 1, 3),
    Request([5, 6, 7], Sampling(), 0, 2),
    Request([8, 9], WARM, 2, 5),
]


def texts(steps, count):
    ids = [[] for _ in range(count)]
    step = None
    for step in steps:
        for text, new in zip(ids, step.new_tokens, strict=True):
            text += new
    assert step is not None
    return ids, step


def test_requests_get_their_own_texts_in_their_places(shallow):
    engine = shallow("local")
    report, together = Report(len(REQUESTS)), []
    for step in engine.serve(REQUESTS):
        report.add(step)
        together.append(step)
    ids, last = texts(together, len(REQUESTS))
    for request, text in zip(REQUESTS, ids, strict=True):
        alone = engine.generate([request.ids], Limits(request.max_new_tokens), request.sampling, request.seed)
        assert text == texts(alone, 1)[0][0]
    assert [len(text) for text in ids] == [6, 3, 2, 5]
    assert last.finished == [True] * 4
    assert last.counts.rounds.tolist() == [5, 2, 1, 4]
    assert report.tokens == 16
    seconds = [step.seconds for step in together]
    assert seconds == sorted(seconds)


def test_few_slots_give_the_same_texts_and_counts(shallow):
    whole, last = texts(shallow("local").serve(REQUESTS), 4)
    alone, end = texts(shallow("local").serve(REQUESTS, slots=1), 4)
    assert alone == whole
    assert end.counts.round_tokens.tolist() == last.counts.round_tokens.tolist()
    assert end.finished == [True] * 4


def test_a_text_that_the_host_has_ended_leaves_its_slot(shallow):
    engine = shallow("local")
    steps = list(engine.serve(REQUESTS[:2], ended=lambda index: index == 0))
    ids, _ = texts(steps, 2)
    assert len(ids[0]) == 1  # the chunk brings the first token, and no round follows
    assert len(ids[1]) == 3


def test_limits_that_do_not_fit_are_refused(shallow):
    with pytest.raises(ValueError, match=r"there are 2 limits for 1 prompts"):
        next(shallow("local").generate([[5]], Limits(3, each=(3, 2)), Sampling()))
    with pytest.raises(ValueError, match=r"each is \(0, 1\); it must be positive"):
        Limits(3, each=(0, 1))
    with pytest.raises(ValueError, match="a prompt may have 4 new tokens and all at most 3"):
        Limits(3, each=(4, 1))


def test_more_stop_tokens_than_a_slot_holds_are_refused(shallow):
    with pytest.raises(ValueError, match="prompt 2 has 9 stop tokens; at most 8 fit"):
        next(shallow("local").serve([REQUESTS[0], Request([5], Sampling(), 0, 2, stop_ids=tuple(range(9)))]))
