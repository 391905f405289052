"""The bundled model on its tasks: counts against the answers themselves, the same with and without speculation."""

import dataclasses

import pytest

from kimi_jax.cli import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER
from kimi_jax.decoding.engine import PLAIN, Draft
from kimi_jax.evaluation import tasks
from kimi_jax.evaluation.tasks import FamilyScore, score, together, wilson
from kimi_jax.training.generations import answer_text
from kimi_jax.training.tasks import held_out


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (8, 8, 0.6756, 1.0), (50, 100, 0.4038, 0.5962), (1, 1, 0.2065, 1.0)],
)
def test_wilson_intervals(hits, trials, low, high):
    """Values of R's binom.confint(method = "wilson")."""
    assert wilson(hits, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.fixture(scope="module")
def bundled(engines):
    return engines("local", checkpoint=BUNDLED_CHECKPOINT, drafter=BUNDLED_DRAFTER)


@pytest.fixture(scope="module")
def examples():
    """Five prompts that the model answers, one of them with another answer for its reference."""
    good = held_out("reverse", 5)
    return [*good[:2], dataclasses.replace(good[2], answer=good[2].answer + "x"), *good[3:]]


@pytest.fixture(scope="module")
def scores(bundled, examples):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "held_out", lambda family, count: examples)
        return [s["reverse"] for s in score(bundled, 5, [PLAIN, Draft("ddtree", 16)], ["reverse"], batch=4)]


def test_exact_answers_are_those_equal_to_the_references(bundled, scores, examples):
    plain, _ = scores
    texts = [answer_text(bundled, ids) for ids in plain.answers]
    assert [a == e.answer for a, e in zip(texts, examples, strict=True)] == [True, True, False, True, True]
    assert (plain.exact, plain.prompts) == (4, 5)


def test_speculation_changes_no_answer_and_saves_rounds(scores):
    plain, tree = scores
    assert tree.answers == plain.answers
    assert tree.exact == plain.exact
    assert sum(tree.rounds_by_length) < sum(plain.rounds_by_length) / 2


def test_tokens_are_counted_without_the_prompts_that_fill_a_batch(scores):
    for way in scores:
        assert way.tokens == sum(map(len, way.answers))
    assert scores[0].rounds_by_length == (0, scores[0].tokens - 5)  # prefill draws the first token


def test_families_add_up():
    a = FamilyScore(1, 2, 10, (0, 4), 0.5, ((1,), (2,)))
    b = FamilyScore(3, 3, 20, (0, 1, 7), 1.5, ((3,),))
    assert together({"a": a, "b": b}) == FamilyScore(4, 5, 30, (0, 5, 7), 2.0, ((1,), (2,), (3,)))
    assert together({"a": a, "b": b}).tokens_per_second == 15.0
    assert together({"a": a, "b": b}).acceptance == (5 + 14) / 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": 1, "families": ("chess",)}, "no task family 'chess'; there are add, sort"),
        ({"prompts": 0}, "both must be positive"),
    ],
)
def test_what_cannot_be_scored_is_refused(bundled, options, message):
    with pytest.raises(ValueError, match=message):
        score(bundled, **options)
