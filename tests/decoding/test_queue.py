"""Requests that come and go in slots get the text that each gets alone, whatever happens beside them."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.decoding.automatic import AutomaticBudget, RoundCosts
from kimi_jax.decoding.engine import PLAIN, Draft
from kimi_jax.decoding.generate import Limits, Request, settings_of
from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.sampling import Draws, Sampling
from kimi_jax.decoding.scoring import Window
from kimi_jax.decoding.session import Session
from kimi_jax.decoding.state import Dispatch, Lanes
from kimi_jax.serving import plan
from kimi_jax.serving.transport import Receiver, Sender

TREE = Draft("ddtree", 7)
KINDS = Sampling(), Sampling(0.8, top_p=0.95), Sampling(1.0), Sampling(1.2, top_k=20, min_p=0.02)
FILTERED = KINDS[1], KINDS[3]  # drawn by one program, where each of KINDS may need its own
LENGTHS = [21, 50, 7, 64, 33, 1, 17, 5, 130, 3]
LIMITS = [9, 14, 20, 3, 11, 25, 1, 16, 6, 12]


def some_requests(kinds=KINDS):
    rng = np.random.default_rng(0)
    return [
        Request(rng.integers(0, 300, length).tolist(), kinds[index % len(kinds)], index, limit)
        for index, (length, limit) in enumerate(zip(LENGTHS, LIMITS, strict=True))
    ]


class Watched(Session):
    """A session that notes what was run."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kinds, self.preempted = set(), []

    def run(self, plan, rows=None):
        self.kinds.add("decode" if not plan.lanes else "mixed" if plan.rounds else "chunk")
        self.preempted += plan.preempted
        return super().run(plan, rows)


def shape_for(programs, **changes):
    """Slots of one shape, so that tests with the same programs share what is compiled: hardly more pages than the
    longest text needs, since whoever needs more is put back and goes on later."""
    sizes = {
        "groups": programs.groups,
        "slots_per_group": 3,
        "pages": 4,
        "page_tokens": programs.page_tokens,
        "tiles": 3,
        "lanes": 1,
        "chunk": 16,
        "depth": programs.speculation.max_depth,
        "rounds": (1, 2, 4),
        "admissions": 2,
        "ahead": 1,
    }
    return plan.Shape(**(sizes | changes))


def open_queue(programs, parameters, **changes):
    return Queue(Watched(programs, parameters, shape_for(programs, **changes)))


def submit(queue, requests, stop_ids=(), names=None):
    names = names or map(str, range(len(requests)))
    for name, request, settings in zip(names, requests, settings_of(requests, stop_ids), strict=True):
        queue.submit(plan.Request(name, tuple(request.ids), request.max_new_tokens, settings))


def run(queue, texts=None):
    texts, reasons = {} if texts is None else texts, {}
    while not queue.idle:
        for event, _ in queue.step():
            texts.setdefault(event.id, []).extend(event.tokens)
            if event.reason is not None:
                reasons[event.id] = event.reason
    return texts, reasons


def texts_alone(engine, requests):
    """The text of each request without another beside it and without drafts, by its number."""
    texts = {str(index): [] for index in range(len(requests))}
    for progress in engine.serve(requests, Limits(prefill_chunk=16), slots=1):
        for text, new in zip(texts.values(), progress.new_tokens, strict=True):
            text += new
    return texts


@pytest.fixture(scope="module")
def alone(shallow):
    """What gives the texts of `some_requests` of some kinds, each alone."""
    return functools.cache(lambda kinds=KINDS: texts_alone(shallow(), some_requests(kinds)))


def is_empty(queue):
    scheduler, shape = queue.scheduler, queue.session.shape
    return scheduler.occupied == 0 and scheduler.free_pages == (shape.pages,) * shape.groups


@pytest.mark.parametrize(
    ("mesh", "draft", "kinds", "changes"),
    [
        ("local", TREE, KINDS, {}),
        ("local", PLAIN, FILTERED, {"ahead": 0, "lanes": 2}),
        pytest.param("local", PLAIN, KINDS, {"ahead": 0, "lanes": 2}, marks=pytest.mark.slow),
        pytest.param("hgx-ib-16", TREE, KINDS, {"slots_per_group": 2, "pages": 9}, marks=pytest.mark.slow),
        pytest.param("hgx-ib-16 split cache", TREE, KINDS, {"tiles": 1, "pages": 3}, marks=pytest.mark.slow),
        pytest.param("nvl72", TREE, KINDS, {"slots_per_group": 1, "pages": 9}, marks=pytest.mark.exhaustive),
    ],
)
def test_texts_do_not_know_their_neighbours(mesh, draft, kinds, changes, shallow, alone):
    engine = shallow(mesh)
    queue = open_queue(engine.programs(draft), engine.parameters, **changes)
    submit(queue, some_requests(kinds), engine.stop_ids)
    texts, reasons = run(queue)
    assert texts == alone(kinds)
    assert {*reasons.values()} <= {"length", "stop"}
    assert is_empty(queue)
    assert queue.session.kinds == {"chunk", "mixed", "decode"}


@pytest.mark.parametrize("kinds", [FILTERED, pytest.param(KINDS, marks=pytest.mark.slow)], ids=["filtered", "all"])
def test_rounds_that_the_host_counts_give_the_same_texts(kinds, shallow, alone):
    """As on a GPU, where no dispatch ends early; with a program for few slots."""
    engine, requests = shallow(), some_requests(kinds)
    programs = dataclasses.replace(engine.programs(TREE), ends_early=False)
    queue = open_queue(programs, engine.parameters, slot_counts=(1, 3))
    submit(queue, requests, engine.stop_ids)
    assert run(queue)[0] == alone(kinds)
    assert is_empty(queue)
    assert queue.session.kinds == {"chunk", "mixed", "decode"}
    assert {key[1] for key in programs.drawing(Draws("filters"))._compiled} == {1, 3}


def test_preempted_and_cancelled_requests_change_nobodys_text(shallow):
    """Two texts grow over three of four pages: the younger is computed again, one waits, one is cancelled."""
    engine = shallow()
    some = some_requests(FILTERED)
    requests = [*(dataclasses.replace(some[n], max_new_tokens=100) for n in (1, 3)), some[2], *some[4:6]]
    queue = open_queue(engine.programs(TREE), engine.parameters)
    submit(queue, requests, engine.stop_ids)
    texts = {}
    while not queue.session.preempted:
        for event, _ in queue.step():
            texts.setdefault(event.id, []).extend(event.tokens)
    assert queue.session.preempted == ["1"]
    queue.cancel("3")
    texts, _ = run(queue, texts)
    assert texts.pop("3", []) == []
    assert texts == {name: text for name, text in texts_alone(engine, requests).items() if name != "3"}
    assert is_empty(queue)


def test_a_request_that_is_not_finite_ends_alone_and_leaves_clean_pages(shallow, alone):
    """An embedding of NaN: one request's latents and logits are not finite, and its pages serve others afterwards."""
    engine = shallow()
    poison = 319
    broken = jax.tree.map(lambda x: x, engine.parameters)
    table = broken["target"]["model"]["embed_tokens"]
    table["weight"] = table["weight"].at[poison].set(jnp.nan)
    queue = open_queue(engine.programs(TREE), broken, ahead=0)
    requests = some_requests(FILTERED)
    bad = dataclasses.replace(requests[1], ids=[*requests[1].ids[:20], poison, *requests[1].ids[21:]])
    submit(queue, [requests[0], bad, *requests[2:]], engine.stop_ids)
    texts, reasons = run(queue)
    assert reasons.pop("1") == "error"
    assert "error" not in reasons.values()
    texts.pop("1", None)
    assert texts == {name: text for name, text in alone(FILTERED).items() if name != "1"}
    assert is_empty(queue)
    for layer in queue.session.state.cache:
        assert jnp.isfinite(layer.latent).all()
        assert jnp.isfinite(layer.rope).all()
    for ring in jax.tree.leaves(queue.session.state.context):
        assert jnp.isfinite(ring).all()


@pytest.mark.slow
def test_a_thousand_random_requests_leave_everything_free(shallow):
    """Lengths from 1 to capacity, random arrivals, cancels, stops, kinds, and now and then NaN in somebody's text."""
    engine, poison, rng = shallow(), 319, np.random.default_rng(5)
    parameters = jax.tree.map(lambda x: x, engine.parameters)
    table = parameters["target"]["model"]["embed_tokens"]
    table["weight"] = table["weight"].at[poison].set(jnp.nan)
    queue = open_queue(engine.programs(TREE), parameters, slots_per_group=4)
    capacity, left, broken, told = queue.session.shape.capacity, 1000, set(), {}
    while left or not queue.idle:
        for _ in range(min(left, rng.poisson(2))):
            left -= 1
            length = int(np.clip(rng.lognormal(2.5, 1.2), 1, capacity - 1))
            ids = rng.integers(0, 300, length).tolist()
            if rng.random() < 0.02:
                ids[rng.integers(length)] = poison
                broken.add(str(left))
            limit = int(np.clip(rng.lognormal(1.5, 1), 0, capacity - length))
            stops = tuple(rng.integers(0, 300, 4).tolist())
            if rng.random() < 0.05:  # two of these want more pages than there are
                limit, stops = capacity - length, ()
            submit(queue, [Request(ids, KINDS[left % 4], left, limit, stop_ids=stops)], names=[str(left)])
            told[str(left)] = [None, [], limit]
        for event, snapshot in queue.step():
            assert told[event.id][0] is None
            told[event.id][0] = event.reason
            told[event.id][1] += event.tokens
            assert (snapshot.counts >= 0).all()
        if rng.random() < 0.1 and (alive := [id for id, (reason, *_) in told.items() if reason is None]):
            ended = queue.cancel(str(rng.choice(alive)))
            assert ended is not None
            told[ended.id][0] = ended.reason
    assert {reason for reason, *_ in told.values()} == {"length", "stop", "cancelled", "error"}
    drawn = {id for id, (_, text, _) in told.items() if poison in text}
    assert {id for id, (reason, *_) in told.items() if reason == "error"} <= broken | drawn
    assert {told[id][0] for id in broken} <= {"error", "cancelled"}
    assert all(len(text) == limit for reason, text, limit in told.values() if reason == "length")
    assert len(told) == 1000
    assert queue.scheduler.preemptions > 0
    assert is_empty(queue)
    state = queue.session.state
    assert (np.asarray(state.lengths) >= 0).all()
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((state.cache, state.context)))


@pytest.mark.parametrize("draft", [PLAIN, pytest.param(TREE, marks=pytest.mark.slow)], ids=["plain", "tree"])
def test_nothing_is_compiled_after_warm_up(draft, shallow):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    engine = shallow()
    programs = dataclasses.replace(engine.programs(draft))  # of which nothing is compiled yet
    queue = open_queue(programs, engine.parameters)
    queue.session.warm()
    requests = some_requests([Sampling()])
    settings_of(requests, ())  # keys are made on the host
    submit(queue, requests[:1], engine.stop_ids)
    run(queue)  # admission
    assert len(compiled) >= 5
    compiled.clear()
    for order in (1, -1):
        submit(queue, requests[::order], engine.stop_ids)
        assert len(run(queue)[0]) == 10
    assert not compiled


def test_log_probabilities_are_those_of_scoring(shallow):
    engine = shallow()
    queue = open_queue(engine.programs(TREE), engine.parameters)
    requests = some_requests(FILTERED)[:5]
    for index, (request, settings) in enumerate(zip(requests, settings_of(requests, ()), strict=True)):
        settings = dataclasses.replace(settings, logprobs=3 if index != 2 else None)
        queue.submit(plan.Request(str(index), tuple(request.ids), request.max_new_tokens, settings))
    texts, told = {}, {}
    while not queue.idle:
        for event, snapshot in queue.step():
            texts.setdefault(event.id, []).extend(event.tokens)
            if event.tokens and snapshot.logprobs is not None:
                told.setdefault(event.id, []).extend(snapshot.logprobs[event.slot, : len(event.tokens)].tolist())
                best = snapshot.top_logprobs[event.slot, 0]
                assert (np.diff(best) <= 0).all()
    asked = [0, 1, 3, 4]
    whole = [[*requests[index].ids, *texts[str(index)]] for index in asked]
    windows = [Window(ids[:-1], texts[str(index)]) for index, ids in zip(asked, whole, strict=True)]
    for place, expected in engine.score(windows):
        np.testing.assert_allclose(told.pop(str(asked[place])), expected.logprobs, atol=1e-4)
    assert told.keys() <= {"2"}


def test_stop_tokens_and_least_tokens_are_each_requests_own(shallow, alone):
    engine, requests = shallow(), some_requests()
    stop = alone()["2"][4]
    end = alone()["2"].index(stop) + 1
    plain = dataclasses.replace(requests[2], stop_ids=(stop,))
    longer = dataclasses.replace(plain, min_tokens=end + 2)
    found = [[] for _ in range(3)]
    for progress in engine.serve([requests[2], plain, longer], Limits()):
        for text, new in zip(found, progress.new_tokens, strict=True):
            text += new
    assert found[0] == alone()["2"]
    assert found[1] == alone()["2"][:end]
    assert len(found[2]) >= end + 2
    assert found[2][: end - 1] == alone()["2"][: end - 1]
    assert stop not in found[2][: end + 1]


def test_a_dropped_iterator_leaves_nothing_in_flight(shallow, alone):
    engine, request = shallow(), some_requests()[2]
    steps = engine.serve([request] * 3, Limits(rounds_per_dispatch=1), TREE)
    next(steps)
    steps.close()
    text = []
    for progress in engine.serve([request] * 3, Limits(rounds_per_dispatch=1), TREE):
        text += progress.new_tokens[0]
    assert text == alone()["2"]


def compiled_text(engine, kind):
    """A program as a GPU would get it, compiled for a CPU."""
    programs = dataclasses.replace(engine.programs(TREE), ends_early=False)
    slots, tiles = 2, 8
    state = jax.eval_shape(lambda: programs.start(slots=slots, pages=slots * tiles, capacity=64 * tiles))

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    now = Dispatch(array(slots, tiles), array(slots, dtype=bool))
    lanes = Lanes(array(1, 16), array(1), array(1), array(1, dtype=bool))
    parameters = {name: engine.parameters[name] for name in programs.needs}
    if kind == "decode":
        lowered = programs.decode(slots, 8).lower(parameters, state, now)
    else:
        lowered = getattr(programs, kind)(slots, tiles).lower(parameters, state, now, lanes)
    return lowered.as_text()


@pytest.mark.parametrize("kind", ["decode", "chunk", "mixed"])
def test_no_branch_and_no_loop_that_the_host_would_drive(kind, shallow):
    """Without an early end: what a GPU runs has no condition, and each loop counts to a number that is written down.

    The reference of the attention is the exception, which follows the longest text; kernels stand in its place.
    """
    text = compiled_text(shallow(), kind)
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text
    loops = len(re.findall(r"stablehlo\.while", text))
    counted = re.findall(r"stablehlo\.compare +LT, %iterArg\w*, %c\w*", text)
    assert loops >= (kind == "decode")
    assert len(counted) == loops, "a bound is a constant"


def test_another_process_follows(shallow):
    """Plans that have travelled leave the same state behind, experts and rows included."""
    engine = shallow()
    programs = engine.programs(TREE)
    sender = Sender(2, "127.0.0.1")
    receiver = Receiver("127.0.0.1", sender.announcement, 1, 30)
    sender.accept(30)
    automatic = AutomaticBudget(RoundCosts({1: 10, 8: 11}, "estimated"), 8)
    leads, follows = (
        Queue(session, automatic, link=link)
        for session, link in (
            (Session(programs, engine.parameters, shape_for(programs)), sender),
            (Session(programs, engine.parameters, shape_for(programs)), receiver),
        )
    )
    submit(leads, some_requests(FILTERED)[:4])
    leads.step()
    leads.rest()
    submit(leads, some_requests(FILTERED)[4:6], names=["late", "later"])
    leads.cancel("1")
    texts, _ = run(leads)
    leads.close()
    follows.follow()  # the messages wait in the socket
    assert len(texts["late"]) == LIMITS[4]
    jax.tree.map(np.testing.assert_array_equal, leads.session.state, follows.session.state)
    assert np.asarray(leads.session.state.lengths).any()
