"""The automatic budget against a machine and a drafter that are known."""

import pytest

from kimi_jax.decoding.automatic import PROBE_EVERY, PROBE_ROUNDS, AutomaticBudget, RoundCosts

BLOCK = 8
FLAT = RoundCosts({1: 100.0, 8: 105.0, 16: 110.0, 32: 120.0}, "estimated")
STEEP = RoundCosts({1: 100.0, 8: 560.0, 16: 860.0}, "measured")


def drive(automatic, drafted, rounds):
    """Rows of each dispatch until `rounds` have run, where a round with a draft gives `drafted` tokens."""
    picks = []
    while rounds > 0:
        rows, run = automatic.next(8)
        automatic.observe(rows, run, run * (1 if rows == 1 else drafted))
        picks.append(rows)
        rounds -= run
    return picks


def test_an_unknown_drafter_is_tried_after_one_plain_dispatch():
    automatic = AutomaticBudget(STEEP, BLOCK)
    assert automatic.next(8) == (1, 8)
    automatic.observe(1, 8, 8)
    assert automatic.next(8) == (8, PROBE_ROUNDS)
    automatic.observe(8, PROBE_ROUNDS, 7 * PROBE_ROUNDS)
    assert automatic.next(8) == (8, 8), "7 tokens for 5.6 plain steps pay, 7.5 for 8.6 do not"


def test_a_known_drafter_is_used_from_the_start_where_it_pays():
    assert AutomaticBudget(STEEP, BLOCK, prior=6.4).next(1) == (8, 1)
    assert AutomaticBudget(STEEP, BLOCK, prior=5.0).next(1) == (1, 1)
    # Where rows are nearly free a larger tree pays as long as the block is longer than what is accepted.
    assert AutomaticBudget(FLAT, BLOCK, prior=4.0).next(1) == (16, 1), "32 rows are less than 2 % better"
    assert AutomaticBudget(FLAT, BLOCK, prior=8.0).next(1) == (8, 1)


def test_drafts_that_stop_paying_are_left_and_tried_again():
    automatic = AutomaticBudget(STEEP, BLOCK, prior=7.0)
    picks = drive(automatic, drafted=2, rounds=600)
    first = picks.index(1)
    assert set(picks[:first]) == {8}
    assert first <= 3, "a few dispatches tell"
    later = picks[first:]
    assert later.count(8) == pytest.approx(len(later) / (PROBE_EVERY + 1), abs=1)
    assert set(drive(automatic, drafted=7, rounds=1200)[-5:]) == {8}, "probes find a better text"


def test_a_batch_that_drafts_would_slow_down_keeps_nothing_for_them():
    automatic = AutomaticBudget(STEEP, BLOCK, prior=2.0)
    begun = [automatic.begin() for _ in range(3 * PROBE_EVERY)]
    assert begun == ([False] * (PROBE_EVERY - 1) + [True]) * 3, "one in PROBE_EVERY batches tries again"
    assert automatic.next(8) == (8, PROBE_ROUNDS)
    assert AutomaticBudget(STEEP, BLOCK, prior=6.4).begin()
    assert AutomaticBudget(STEEP, BLOCK).begin(), "nothing is known of the drafter"


def test_few_slots_at_work_have_costs_of_their_own():
    automatic = AutomaticBudget(STEEP, BLOCK, prior=5.0, fewer={4: STEEP, 2: FLAT})
    assert automatic.next(8, running=3) == automatic.next(8) == (1, 8)
    assert automatic.next(8, running=2) == (16, 8)
    assert automatic.next(8, running=1) == (16, 8)
    assert automatic.next(8, running=5) == (1, 8)


def test_rows_stay_where_others_are_little_better():
    automatic = AutomaticBudget(FLAT, BLOCK, prior=4.0)
    assert automatic.next(8) == (16, 8)
    automatic.observe(16, 8, 60)
    assert AutomaticBudget(FLAT, BLOCK, prior=automatic.acceptance).next(8) == (8, 8), "what a new start would take"
    assert automatic.next(8) == (16, 8), "but it is no tenth better"


def test_acceptance_is_told_for_the_smallest_tree_whatever_was_verified():
    automatic = AutomaticBudget(FLAT, BLOCK, prior=None)
    automatic.observe(32, 100, round(100 * (8 - 5 * 0.87**2)))
    assert automatic.acceptance == pytest.approx(3.0, rel=0.01)
    assert automatic.expected(32) == pytest.approx(8 - 5 * 0.87**2, rel=0.01)
    assert automatic.expected(8) == pytest.approx(3.0, rel=0.01)


def test_no_more_is_expected_than_a_block_or_the_rows():
    automatic = AutomaticBudget(FLAT, BLOCK, prior=8.0)
    assert automatic.expected(32) == BLOCK
    automatic.observe(32, 1000, 1000)
    assert automatic.acceptance == pytest.approx(1.0, abs=0.01), "no draft was right"
    assert AutomaticBudget(FLAT, 16, prior=12.0).expected(8) == 8


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({8: 1.0}, "1 row"),
        ({1: 1.0, 9: 2.0}, r"others of \(1, 8"),
        ({1: 0.0}, "positive"),
        ({1: float("nan")}, "finite"),
    ],
)
def test_impossible_costs_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        RoundCosts(costs, "measured")
