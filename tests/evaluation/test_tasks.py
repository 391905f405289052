"""The bundled model on its tasks: counts against the answers themselves, the same with and without speculation."""

import dataclasses

import pytest

from kimi_jax.decoding.engine import PLAIN, Draft
from kimi_jax.evaluation import tasks
from kimi_jax.evaluation.tasks import FamilyScore, score, together, wilson
from kimi_jax.opening import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER
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
def engine(engines):
    """The random model: it answers nothing, so the references are made from what it says."""
    return engines("local")


def score_of(engine, examples, drafts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "held_out", lambda family, count: examples)
        return [s["reverse"] for s in score(engine, len(examples), drafts, ["reverse"], batch=4)]


def test_exact_answers_are_those_equal_to_the_references(engine):
    asked = held_out("reverse", 5)
    (wrong,) = score_of(engine, asked, [PLAIN])
    assert wrong.exact == 0
    says = [answer_text(engine, ids) for ids in wrong.answers]
    changed = [dataclasses.replace(e, answer=text) for e, text in zip(asked, says, strict=True)]
    (right,) = score_of(engine, [*changed[:2], asked[2], *changed[3:]], [PLAIN])
    assert (right.exact, right.prompts) == (4, 5)
    assert right.answers == wrong.answers
    assert right.tokens == sum(map(len, right.answers))  # of five, not of those that fill the second batch
    assert right.steps == max(map(len, right.answers[:4])) - 1 + len(right.answers[4]) - 1
    assert 0 < right.decoding_seconds < right.seconds
    assert right.rounds_by_length == (0, right.tokens - 5)  # prefill draws the first token


@pytest.mark.slow
def test_speculation_changes_no_answer_of_the_bundled_model_and_saves_rounds(engines):
    bundled = engines("local", checkpoint=BUNDLED_CHECKPOINT, drafter=BUNDLED_DRAFTER)
    plain, tree = score_of(bundled, held_out("reverse", 5), [PLAIN, Draft("ddtree", 16)])
    assert plain.exact == tree.exact == 5
    assert tree.answers == plain.answers
    assert sum(tree.rounds_by_length) < sum(plain.rounds_by_length) / 2


def test_families_add_up():
    a = FamilyScore(1, 2, 10, (0, 4), 0.9, 3, 0.5, ((1,), (2,)))
    b = FamilyScore(3, 3, 20, (0, 1, 7), 1.9, 6, 1.0, ((3,),))
    assert together({"a": a, "b": b}) == FamilyScore(4, 5, 30, (0, 5, 7), 2.8, 9, 1.5, ((1,), (2,), (3,)))
    assert together({"a": a, "b": b}).tokens_per_second == pytest.approx((30 - 5) / 1.5)  # prefill draws the first
    assert together({"a": a, "b": b}).acceptance == (5 + 14) / 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": 1, "families": ("chess",)}, "no task family 'chess'; there are add, sort"),
        ({"prompts": 0}, "both must be positive"),
    ],
)
def test_what_cannot_be_scored_is_refused(engine, options, message):
    with pytest.raises(ValueError, match=message):
        score(engine, **options)
