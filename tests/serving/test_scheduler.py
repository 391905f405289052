"""The scheduler's rules, one at a time, and then all of them under a thousand random requests."""

import dataclasses
import random

import pytest

from kimi_jax.serving.events import Seen
from kimi_jax.serving.plan import Request, Settings, Shape
from kimi_jax.serving.scheduler import PREEMPTIONS, Scheduler
from tests.serving.device import VOCABULARY, Device, Host, alone, requests

SHAPE = Shape(groups=1, slots_per_group=4, pages=64, page_tokens=4, tiles=32, lanes=2, chunk=8, depth=2)


def request(id: str, prompt: int, limit: int, **settings) -> Request:
    return Request(id, tuple(range(1, prompt + 1)), limit, Settings(**{"key": (1, len(id))} | settings))


def shape(**changes) -> Shape:
    return dataclasses.replace(SHAPE, **({"slot_counts": ()} | changes))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_request_alone(ahead):
    host = Host(shape(ahead=ahead))
    host.submit(one := request("a", 19, 30))
    host.finish()
    assert (host.outcomes["a"].text, host.outcomes["a"].reason) == (alone(one), "length")
    assert [(lane.start, len(lane.tokens), lane.last) for plan in host.plans for lane in plan.lanes] == [
        (0, 8, False),
        (8, 8, False),
        (16, 3, True),
    ]
    assert [plan.rounds for plan in host.plans[:4]] == [0, 0, 0, 8]
    host.check_empty()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("limit", "rounds"), [(13, [0, 8, 8]), (11, [0, 8, 2]), (10, [0, 8, 1]), (1, [0])])
def test_no_more_rounds_than_the_limit_needs(ahead, limit, rounds):
    """The first token comes with the prompt; of the last rounds none is missed or run twice."""
    host = Host(shape(ahead=ahead, depth=0))
    host.submit(request("a", 3, limit))
    host.finish()
    assert [plan.rounds for plan in host.plans] == rounds
    assert host.device.used == limit - 1


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("slots", [1, 3])
def test_rounds_that_give_nothing_are_run_again(ahead, slots):
    """A slot is not given away for tokens that may not come, though the same dispatches are sure to end without losses.

    Every third dispatch of one group and every fifth of the other is lost.
    """
    rules = {"ahead": ahead, "slots_per_group": slots, "groups": 2, "lanes": 1, "rounds_repeat": True}
    device = Device(shape(**rules), overflows=lambda number, group: number % (3 + 2 * group) == 0)
    host = Host(device.shape, device)
    some = [request("x" * number, number, 3 * number) for number in range(1, 16)]
    host.submit(*some)
    host.finish()
    assert all(host.outcomes[one.id].text == alone(one) for one in some)
    assert {outcome.reason for outcome in host.outcomes.values()} == {"length"}
    host.check_empty()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("depth", [0, 2])
def test_prompts_of_every_length(ahead, depth):
    """Each ends elsewhere in a page and in a chunk, with rounds planned before its last chunks were read."""
    for length in range(1, 21):
        host = Host(shape(ahead=ahead, depth=depth))
        host.submit(one := request("a", length, 21))
        host.finish()
        assert host.outcomes["a"].text == alone(one)


def test_fewer_rounds_where_the_caller_wants_fewer():
    scheduler = Scheduler(shape(depth=0))
    scheduler.submit(request("a", 3, 100))
    assert [plan.rounds for most in (8, 3, 1) if (plan := scheduler.plan(most))] == [0, 2]
    scheduler.observe(0, {0: Seen((1,))})
    assert (plan := scheduler.plan(1))
    assert plan.rounds == 1


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("place", [0, 1, 5, 29])
def test_a_stop_token_ends_a_request(ahead, place):
    whole = alone(request("a", 9, 30))
    one = request("a", 9, 30, stop_ids=(whole[place],), min_tokens=0)
    host = Host(shape(ahead=ahead))
    host.submit(one)
    host.finish()
    expected = whole[: whole.index(whole[place]) + 1]
    assert (host.outcomes["a"].text, host.outcomes["a"].reason) == (expected, "stop")
    host.check_empty()


@pytest.mark.parametrize("ahead", [0, 1])
def test_scoring_ends_with_the_prompt(ahead):
    host = Host(shape(ahead=ahead, slots_per_group=1, lanes=1))
    host.submit(request("a", 17, 0), request("bb", 5, 0))
    host.finish()
    assert [host.outcomes[id].reason for id in ("a", "bb")] == ["length", "length"]
    assert all(outcome.text == () for outcome in host.outcomes.values())
    assert [plan.rounds for plan in host.plans] == [0, 0, 0, 0]
    host.check_empty()


def test_impossible_requests_are_refused_with_what_would_fit():
    scheduler = Scheduler(SHAPE)
    with pytest.raises(ValueError, match=r"'a' needs room for 129 tokens, 100 of .* 29 of .* 128: a limit of 28 would"):
        scheduler.submit(request("a", 100, 29))
    with pytest.raises(ValueError, match="the prompt alone must be shorter"):
        scheduler.submit(request("a", 128, 1))
    with pytest.raises(ValueError, match="room for 40: a limit of 30"):
        Scheduler(shape(pages=10)).submit(request("a", 10, 31))
    assert scheduler.idle
    scheduler.submit(request("a", 100, 28))
    with pytest.raises(ValueError, match="'a' is under way"):
        scheduler.submit(request("a", 1, 1))


def test_dispatches_are_read_in_their_order():
    scheduler = Scheduler(SHAPE)
    with pytest.raises(ValueError, match="dispatch 0 was read, but none is in flight"):
        scheduler.observe(0, {})
    scheduler.submit(request("a", 20, 5))
    assert [scheduler.plan() is None for _ in range(3)] == [False, False, True]
    with pytest.raises(ValueError, match="dispatch 1 was read, but number 0 comes next"):
        scheduler.observe(1, {})


def test_more_tokens_than_the_limit_are_no_answer():
    scheduler = Scheduler(SHAPE)
    scheduler.submit(request("a", 2, 1))
    assert scheduler.plan()
    with pytest.raises(RuntimeError, match="'a' got 2 tokens, more than its 1"):
        scheduler.observe(0, {0: Seen((1, 2))})


def test_groups_by_free_pages_then_slots_and_the_lowest_slot_first():
    host = Host(shape(groups=3, slots_per_group=2, lanes=2, ahead=0))
    host.submit(request("a", 40, 2), request("b", 8, 2), request("c", 8, 2), request("d", 8, 2))
    host.step()
    # The fourth: groups 1 and 2 have as many free pages and slots.
    assert [admission.slot for admission in host.plans[0].admissions] == [0, 2, 4, 3]


def test_lanes_spread_over_groups_and_the_oldest_prompts_run_first():
    host = Host(shape(groups=2, slots_per_group=4, lanes=1, ahead=0))
    host.submit(*(request(str(number), 24, 2) for number in range(4)))
    host.step()
    assert [admission.slot for admission in host.plans[0].admissions] == [0, 4]
    host.finish()
    order = [(lane.slot, lane.start) for plan in host.plans for lane in plan.lanes]
    assert order[:6] == [(0, 0), (4, 0), (0, 8), (4, 8), (0, 16), (4, 16)]


def test_slots_are_computed_up_to_the_highest_that_runs():
    host = Host(shape(slots_per_group=4, slot_counts=(1, 2, 4), lanes=4, ahead=0, depth=0))
    host.submit(*(request(str(number), 2, limit) for number, limit in enumerate((60, 20, 40, 30))))
    host.finish()
    counts = [plan.slots for plan in host.plans]
    assert counts[0] == 0
    assert sorted(set(counts[1:]), reverse=True) == [4, 1]  # the third ends after the second
    assert counts[1:] == sorted(counts[1:], reverse=True)


def test_few_rounds_while_requests_wait():
    host = Host(shape(slots_per_group=2, depth=0, ahead=0))
    host.submit(request("a", 4, 40), request("b", 4, 40), request("c", 4, 40))
    while host.scheduler.waiting:
        host.step()
    assert {plan.rounds for plan in host.plans} == {0, 1}
    host.finish()
    assert max(plan.rounds for plan in host.plans) == 8


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_gap_between_two_pieces_is_one_chunk_and_one_dispatch(ahead):
    """Long prompts keep arriving; a running text gets a piece from every plan."""
    host = Host(shape(ahead=ahead, pages=400, tiles=100, slots_per_group=8, lanes=1, depth=1))
    host.submit(request("text", 4, 150))
    silent = worst = number = 0
    while host.outcomes["text"].reason is None:
        if number < 300 and host.scheduler.waiting < 2:
            host.submit(request(f"long {number}", 90, 3))
            number += 1
        pieces = [event.id for event in host.step()]
        if host.outcomes["text"].text:
            silent = 0 if "text" in pieces else silent + 1
            worst = max(worst, silent)
    assert worst == 0
    chunks = [plan for plan in host.plans if plan.lanes and plan.active]
    assert len(chunks) > 50
    assert all(plan.rounds == 1 for plan in chunks)


@pytest.mark.parametrize("ahead", [0, 1])
def test_preemption_changes_no_text(ahead):
    """Four texts grow in a pool that holds little more than two."""
    host = Host(shape(ahead=ahead, pages=24, tiles=20))
    host.submit(*(some := [request("x" * number, 8, 60) for number in range(1, 5)]))
    host.finish()
    assert host.scheduler.preemptions
    assert all(host.outcomes[one.id].text == alone(one) for one in some)
    assert "x" not in [id for plan in host.plans for id in plan.preempted]  # the oldest never is
    host.check_empty()


def test_a_preempted_request_keeps_its_place_in_the_queue():
    host = Host(shape(pages=12, tiles=12, slots_per_group=2, ahead=0), overtakes=0)
    host.submit(request("a", 8, 30), request("b", 8, 30), request("c", 4, 4), request("d", 4, 4))
    host.finish()
    assert {id for plan in host.plans for id in plan.preempted} == {"b"}
    order = [admission.id for plan in host.plans for admission in plan.admissions]
    assert order[:2] == ["a", "b"]
    assert order[-3:] == ["b", "c", "d"]


def test_admission_leaves_a_page_for_each_slot_that_grows():
    for pages, admitted in ((12, ["a", "b"]), (13, ["a", "b", "c"])):
        host = Host(shape(pages=pages, tiles=8, lanes=4, ahead=0))
        # Five pages at once, of eight in the end; five, of five in the end; then two, and one for the first.
        host.submit(request("a", 17, 12), request("b", 17, 3), request("c", 5, 3))
        host.step()
        assert [admission.id for admission in host.plans[0].admissions] == admitted


def test_two_preemptions_and_then_pages_to_the_end():
    drawn, most = random.Random(1), 0
    host = Host(shape(pages=20, tiles=20, slots_per_group=6, ahead=0))
    some = [request("x" * number, drawn.randint(1, 20), drawn.randint(20, 60)) for number in range(1, 40)]
    host.submit(*some)
    host.finish()
    preempted = [id for plan in host.plans for id in plan.preempted]
    for one in some:
        most = max(most, preempted.count(one.id))
        admissions = [(plan, a) for plan in host.plans for a in plan.admissions if a.id == one.id]
        assert len(admissions) == 1 + preempted.count(one.id)
        if len(admissions) == 1 + PREEMPTIONS:
            plan, admission = admissions[-1]
            row = next(row for row in plan.table if row.slot == admission.slot)
            assert len(row.pages) == host.scheduler.shape.pages_for(len(one.ids) + one.limit)
            assert admission.prompt + admission.limit == len(one.ids) + one.limit
            assert admission.emitted == admission.prompt - len(one.ids) > 0
    assert most == PREEMPTIONS
    assert all(host.outcomes[one.id].text == alone(one) for one in some)
    host.check_empty()


def test_a_blocked_request_is_overtaken_a_few_times_only():
    host = Host(shape(pages=32, tiles=32, ahead=0), overtakes=3)
    host.submit(request("first", 40, 40))
    host.step()
    host.submit(request("large", 120, 8), *(request(f"small {number}", 4, 6) for number in range(20)))
    host.finish()
    order = [admission.id for plan in host.plans for admission in plan.admissions]
    assert order[:5] == ["first", "small 0", "small 1", "small 2", "large"]
    assert order[5:] == [f"small {number}" for number in range(3, 20)]


def test_nobody_starves():
    """Small requests never stop arriving, and one as large as the pool still gets its turn."""
    host = Host(shape(pages=32, tiles=32), overtakes=4)
    host.submit(request("first", 4, 10), request("large", 100, 28))
    for number in range(2000):
        host.submit(request(f"small {number}", 4, 10))
        host.step()
        if host.outcomes["large"].reason:
            break
    assert host.outcomes["large"].text == alone(request("large", 100, 28))
    assert number < 200


def test_a_cancel_keeps_its_reason_and_drops_what_is_in_flight():
    host = Host(shape(ahead=1, slots_per_group=1, lanes=1))
    host.submit(request("a", 4, 50), request("b", 4, 50))
    while len(host.outcomes["a"].text) < 5:
        host.step()
    before = host.outcomes["a"].text
    host.cancel("a", "stop")
    assert (host.outcomes["a"].text, host.outcomes["a"].reason) == (before, "stop")
    host.step()
    assert [admission.id for admission in host.plans[-1].admissions] == ["b"]
    host.finish()
    assert host.outcomes["a"].text == before
    assert host.scheduler.cancel("a") is None
    host.check_empty()


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_failure_ends_its_request_alone(ahead):
    some = [request("a", 30, 9), request("bb", 5, 40), request("ccc", 6, 40)]
    failing = {"a": 12, "bb": 25}
    sizes = shape(ahead=ahead)
    host = Host(sizes, Device(sizes, lambda id, position: failing.get(id) == position))
    host.submit(*some)
    host.finish()
    assert (host.outcomes["a"].reason, host.outcomes["a"].failed, host.outcomes["a"].text) == ("error", 12, ())
    assert (host.outcomes["bb"].reason, host.outcomes["bb"].failed) == ("error", 25)
    assert host.outcomes["bb"].text == alone(some[1])[:20]
    assert (host.outcomes["ccc"].reason, host.outcomes["ccc"].text) == ("length", alone(some[2]))
    host.check_empty()


def test_what_else_was_read_comes_with_the_event():
    scheduler = Scheduler(SHAPE)
    scheduler.submit(request("a", 12, 1))
    scheduler.plan()
    scheduler.plan()
    assert [event.extra for event in scheduler.observe(0, {0: Seen(extra="prompt")})] == ["prompt"]
    (event,) = scheduler.observe(1, {0: Seen((3,), True, extra="end")})
    assert (event.id, event.tokens, event.reason, event.slot, event.extra) == ("a", (3,), "length", 0, "end")


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    "sizes",
    [
        shape(groups=2, pages=40, tiles=30, lanes=2),
        shape(slots_per_group=8, pages=30, tiles=30, lanes=1, depth=0, slot_counts=(2, 4, 8)),
        shape(groups=3, slots_per_group=3, pages=16, tiles=16, page_tokens=8, lanes=3, depth=6, admissions=2),
    ],
)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_thousands_of_requests_leave_nothing_behind(sizes, ahead, prefix_cache):
    drawn = random.Random(ahead)
    sizes = dataclasses.replace(sizes, ahead=ahead)
    capacity = sizes.capacity
    some = list(
        requests(
            150,
            ahead,
            prompt=lambda r: min(int(r.lognormvariate(2.5, 1)) + 1, capacity),
            limit=lambda r: min(int(r.lognormvariate(2.5, 1)), capacity),
        )
    )
    some = [dataclasses.replace(one, limit=min(one.limit, capacity - len(one.ids))) for one in some]
    some = [
        dataclasses.replace(one, settings=dataclasses.replace(one.settings, stop_ids=(drawn.randrange(VOCABULARY),)))
        if drawn.random() < 0.3
        else one
        for one in some
    ]
    beginnings = [tuple(drawn.randrange(VOCABULARY) for _ in range(50)) for _ in range(4)]
    if prefix_cache:
        some = [
            dataclasses.replace(
                one, ids=(*drawn.choice(beginnings), *one.ids)[: len(one.ids)], salt=drawn.choice("aab")
            )
            for one in some
        ]
    failing = {one.id: drawn.randrange(len(one.ids) + one.limit) for one in some if drawn.random() < 0.12}
    fails = Device(sizes, lambda id, position: failing.get(id) == position)
    host = Host(sizes, fails, prefix_cache=prefix_cache)
    arriving, rate = list(some)[::-1], 0.5
    while arriving or not host.scheduler.idle:
        rate = drawn.choice((0.1, 0.5, 0.9)) if drawn.random() < 0.01 else rate
        while arriving and drawn.random() < rate:
            host.submit(arriving.pop())
        if drawn.random() < 0.08 and host.outcomes:
            host.cancel(drawn.choice(list(host.outcomes)))
        host.step()
    host.check_empty()
    reasons = [outcome.reason for outcome in host.outcomes.values()]
    assert all(reasons.count(reason) for reason in ("stop", "length", "error", "cancelled"))
    assert host.scheduler.preemptions
    assert (host.scheduler.reused_tokens > 0.1 * host.scheduler.prompt_tokens) == prefix_cache
    for one in some:
        outcome, whole = host.outcomes[one.id], alone(one)
        assert outcome.text == whole[: len(outcome.text)]
        if outcome.reason == "error":
            assert outcome.failed == failing[one.id]
            # What was found in pages did not fail, but may when it is computed again after a preemption.
            told = max(outcome.failed - len(one.ids), 0)
            assert len(outcome.text) == told or (prefix_cache and not told)
        elif outcome.reason != "cancelled":
            assert outcome.text == whole
            stopped = whole and whole[-1] in one.settings.stop_ids
            assert outcome.reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("ahead", [0, 1])
def test_slots_are_used_while_requests_wait(ahead):
    """200 requests of log-normal lengths through 8 slots, against batches that each end with their longest."""
    sizes = Shape(1, 8, 1000, 8, 200, lanes=1, chunk=64, depth=3, ahead=ahead)
    some = list(
        requests(
            200, 7, prompt=lambda r: r.randint(4, 40), limit=lambda r: max(1, min(int(r.lognormvariate(4.3, 0.8)), 800))
        )
    )
    host = Host(sizes)
    host.submit(*some)
    while host.scheduler.waiting:
        host.step()
    device = host.device
    assert device.used / device.slot_rounds >= 0.9, f"{device.used / device.slot_rounds:.3f}"
    host.finish()
    needed = [device.rounds_of[one.id] for one in some]
    static = sum(max(needed[first : first + 8]) for first in range(0, len(needed), 8))
    assert device.rounds <= static / 2, (device.rounds, static)
