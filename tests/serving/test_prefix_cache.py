"""Prompts that begin alike start behind what they share, wherever that is, and their texts stay what they are alone."""

import dataclasses
import random

import pytest

from kimi_jax.serving.plan import Request, Settings, Shape
from tests.serving.device import VOCABULARY, Device, Host, alone

SHAPE = Shape(groups=1, slots_per_group=4, pages=64, page_tokens=4, tiles=32, lanes=1, chunk=8, depth=2)


def shape(**changes) -> Shape:
    return dataclasses.replace(SHAPE, **({"slot_counts": ()} | changes))


def ids(seed: int, count: int) -> tuple[int, ...]:
    drawn = random.Random(seed)
    return tuple(drawn.randrange(VOCABULARY) for _ in range(count))


def admissions(host: Host) -> dict[str, tuple[int, int]]:
    """Slot and cached tokens of each request's last admission."""
    return {admission.id: (admission.slot, admission.cached) for plan in host.plans for admission in plan.admissions}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("count", "cached"), [(3, 0), (4, 0), (5, 4), (16, 12), (17, 16), (18, 16), (25, 24), (40, 24)]
)
def test_a_hit_is_whole_pages_and_leaves_a_token(ahead, count, cached):
    beginning, rest = ids(0, 25), ids(1, 15)
    first, second = (
        Request("first", beginning, 9),
        Request("second", (*beginning, *rest)[:count], 9, Settings(key=(1, 1))),
    )
    host = Host(shape(ahead=ahead), prefix_cache=True)
    host.submit(first)
    host.finish()
    host.submit(second)
    host.finish()
    assert admissions(host) == {"first": (0, 0), "second": (0, cached)}
    lanes = [lane.start for plan in host.plans if plan.number > 0 for lane in plan.lanes]
    assert min(lane for lane in lanes if lane >= cached) == cached
    assert [host.outcomes[one.id].text for one in (first, second)] == [alone(first), alone(second)]
    assert (host.scheduler.prompt_tokens, host.scheduler.reused_tokens) == (25 + count, cached)
    host.check_empty()


def test_what_bounds_a_hit():
    prompt = ids(0, 30)
    host = Host(shape(), prefix_cache=True)
    host.submit(Request("first", prompt, 4))
    host.finish()
    others = [
        Request("logprobs", prompt, 4, Settings(prompt_logprobs=0)),
        Request("some logprobs", prompt, 4, Settings(prompt_logprobs=0), reusable=14),
        Request("bounded", prompt, 4, reusable=20),
        Request("salt", prompt, 4, salt="tenant"),
        Request("again", prompt, 4),
    ]
    for one in others:
        host.submit(one)
        host.finish()
    cached = {id: cached for id, (_, cached) in admissions(host).items()}
    assert cached == {"first": 0, "logprobs": 0, "some logprobs": 12, "bounded": 20, "salt": 0, "again": 28}
    assert not any(host.outcomes[one.id].text != alone(one) for one in others)
    off = Host(shape())
    off.submit(Request("first", prompt, 4), Request("again", prompt, 4))
    off.finish()
    assert off.scheduler.reused_tokens == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_conversation_goes_on_behind_its_answer(ahead):
    host, text = Host(shape(ahead=ahead), prefix_cache=True), ids(0, 10)
    for turn in range(4):
        one = Request(str(turn), text, 12)
        host.submit(one)
        host.finish()
        assert host.outcomes[one.id].text == alone(one)
        # All that was computed: the prompt and the answer but for its last token, in whole pages.
        assert admissions(host)[one.id][1] == (0 if not turn else (len(text) - 1 - 5) // 4 * 4)
        text = (*text, *alone(one), *ids(turn + 1, 5))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("groups", "lanes"), [(1, 1), (1, 3), (4, 1), (4, 2)])
def test_the_choices_of_a_question_cost_one_prefill(ahead, groups, lanes):
    """Five examples before every question, four choices each, all scored at the choice only."""
    sizes = Shape(groups, 8, 300, 8, 60, lanes, chunk=64, depth=0, ahead=ahead)
    examples, some = ids(0, 200), []
    for question in range(30):
        asked = (*examples, *ids(1000 + question, 60))
        for choice in range(4):
            whole = (*asked, *ids(10_000 + 4 * question + choice, 6))
            some.append(Request(f"{question} {choice}", whole, 0, Settings(prompt_logprobs=0), reusable=len(asked) - 1))
    host = Host(sizes, prefix_cache=True)
    host.submit(*some)
    host.finish()
    run = sum(len(lane.tokens) for plan in host.plans for lane in plan.lanes)
    assert run <= 0.35 * sum(len(one.ids) for one in some)
    assert all(host.outcomes[one.id].reason == "length" for one in some)
    host.check_empty()


def test_what_a_drafter_cannot_go_on_from_is_run_and_counted():
    host = Host(shape(), prefix_cache=True, drafter_goes_on=False)
    some = [Request(str(number), ids(0, 25), 9, Settings(key=(number, 0))) for number in range(3)]
    for one in some:
        host.submit(one)
        host.finish()
    assert {cached for _, cached in admissions(host).values()} == {0}
    assert (host.scheduler.reused_tokens, host.scheduler.drafter_misses) == (0, 2 * 24)
    assert [host.outcomes[one.id].text for one in some] == [alone(one) for one in some]
    host.check_empty()


def test_samples_of_a_prompt_share_its_pages():
    prompt = ids(0, 37)
    some = [Request(str(sample), prompt, 20, Settings(key=(sample, 0))) for sample in range(4)]
    host = Host(shape(), prefix_cache=True)
    host.submit(*some)
    while len(admissions(host)) < 4:
        host.step()
    rows = [set(host.device.table[slot, :9].tolist()) for slot in range(4)]
    assert rows[0] == rows[1] == rows[2] == rows[3]
    host.finish()
    assert [host.outcomes[one.id].text for one in some] == [alone(one) for one in some]
    assert host.scheduler.reused_tokens == 3 * 36


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_waits_for_what_another_prefills(ahead):
    """Also where that one has left its slot, since it only scores and its last chunk is on its way."""
    host = Host(shape(ahead=ahead, lanes=2), prefix_cache=True)
    host.submit(Request("first", ids(0, 8), 0), Request("second", ids(0, 8), 0), Request("other", ids(1, 8), 0))
    host.finish()
    assert [[lane.start for lane in plan.lanes] for plan in host.plans] == [[0, 0], [4]]
    assert {id: cached for id, (_, cached) in admissions(host).items()} == {"first": 0, "other": 0, "second": 4}


def test_nobody_waits_for_pages_that_are_not_for_it():
    host = Host(shape(ahead=0, lanes=3), prefix_cache=True)
    logprobs = Request("logprobs", ids(0, 24), 3, Settings(prompt_logprobs=0))
    host.submit(Request("first", ids(0, 24), 3), Request("salt", ids(0, 24), 3, salt="tenant"), logprobs)
    host.step()
    assert len(host.plans[0].lanes) == 3


@pytest.mark.parametrize(("left", "group", "cached"), [(8, 0, 24), (24, 0, 24), (32, 1, 0)])
def test_a_lane_is_waited_for_while_that_costs_less_than_it_saves(left, group, cached):
    host = Host(shape(groups=2, ahead=0), prefix_cache=True)
    host.submit(Request("first", ids(0, 24), 1))
    host.finish()
    host.submit(Request("busy", ids(1, 8 + left), 1))
    host.step()
    host.submit(second := Request("second", (*ids(0, 24), 1, 2), 1))
    host.finish()
    slot, found = admissions(host)["second"]
    assert (host.scheduler.shape.group(slot), found) == (group, cached)
    assert host.outcomes["second"].text == alone(second)


def test_shared_pages_are_needed_once():
    host = Host(shape(pages=16, tiles=16, ahead=0), prefix_cache=True)
    host.submit(first := Request("first", ids(0, 40), 8))
    while not host.outcomes["first"].text:
        host.step()
    host.submit(second := Request("second", ids(0, 40), 8, Settings(key=(1, 1))))
    host.step()
    assert admissions(host)["second"] == (1, 36)
    host.finish()
    assert [host.outcomes[one.id].text for one in (first, second)] == [alone(first), alone(second)]


def test_the_same_text_in_two_places_becomes_one():
    """Prompts whose log-probabilities are wanted are computed, each in its own pages."""
    prompt = ids(0, 24)
    host = Host(shape(lanes=2, ahead=0), prefix_cache=True)
    some = [
        Request(str(number), (*prompt, *ids(number, 3)), 40, Settings(key=(number, 0), prompt_logprobs=0))
        for number in range(2)
    ]
    host.submit(*some)
    host.step()
    assert not {*host.device.table[0, :6].tolist()} & {*host.device.table[1, :6].tolist()}
    for _ in range(4):
        host.step()
    assert host.device.table[0, :6].tolist() == host.device.table[1, :6].tolist()
    held = {*host.device.table.ravel().tolist()} - {host.scheduler.shape.no_page}
    assert host.scheduler.free_pages[0] == 64 - len(held)
    host.finish()
    assert [host.outcomes[one.id].text for one in some] == [alone(one) for one in some]
    host.check_empty()


def test_the_group_with_the_longest_hit_unless_another_is_much_freer():
    prompt = ids(0, 24)
    for busy, group in ((0, 0), (60, 0), (124, 1)):
        host = Host(shape(groups=2, pages=40, tiles=40, ahead=0), prefix_cache=True)
        host.submit(Request("first", prompt, 1))
        host.finish()
        if busy:
            host.submit(Request("busy", (*prompt[:8], *ids(5, busy - 8)), 8))
            while not host.outcomes["busy"].text:
                host.step()
        host.submit(Request("second", (*prompt, 1, 2, 3), 1))
        host.step()
        slot, cached = admissions(host)["second"]
        assert (SHAPE.group(slot), cached) == (group, 0 if group else 24), busy


def test_pages_of_a_failed_request_are_no_one_elses():
    prompt, sizes = ids(0, 40), shape(ahead=0)
    host = Host(sizes, Device(sizes, lambda id, position: id == "bad" and position == 36), prefix_cache=True)
    host.submit(Request("good", prompt[:9], 1))
    host.finish()
    host.submit(Request("bad", prompt, 4))
    host.finish()
    assert host.outcomes["bad"].reason == "error"
    host.submit(one := Request("after", prompt, 4))
    host.finish()
    assert admissions(host)["after"] == (0, 8)
    assert host.outcomes["after"].text == alone(one)


def test_a_preempted_request_starts_behind_what_is_left_of_it():
    """The first takes two of its six pages and ends."""
    host = Host(shape(pages=12, tiles=12, ahead=0, depth=0), prefix_cache=True)
    some = [Request("a", ids(0, 8), 22), Request("b", ids(1, 8), 30)]
    host.submit(*some)
    host.finish()
    assert [id for plan in host.plans for id in plan.preempted] == ["b"]
    assert admissions(host)["b"] == (0, 16)
    assert all(host.outcomes[one.id].text == alone(one) for one in some)
    host.check_empty()
