"""Behind pages that others have filled, target and drafter say what they say behind a prompt of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.decoding.engine import Draft
from kimi_jax.decoding.generate import Request
from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.report import Report
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.session import Session
from kimi_jax.serving import plan
from kimi_jax.serving.scheduler import Scheduler

TREE = Draft("ddtree", 7)
WINDOW = 2
"""Pages of the drafter's window."""


@pytest.fixture(scope="module")
def queues(shallow):
    """Two queues that share programs, with and without the cache: slots for texts of five pages."""

    @functools.cache
    def narrow(mesh):
        engine = shallow(mesh)
        window = WINDOW * engine.programs().page_tokens
        config = dataclasses.replace(engine.drafter.config, draft_window=window)
        return dataclasses.replace(engine, drafter=type(engine.drafter)(config, engine.mesh.shape["tp"]))

    def opened(mesh="local"):
        engine = narrow(mesh)
        programs = engine.programs(TREE)
        shape = plan.Shape(
            groups=programs.groups, slots_per_group=2, pages=16, page_tokens=programs.page_tokens, tiles=5, lanes=1,
            chunk=programs.page_tokens, depth=programs.speculation.max_depth, rounds=(1, 4), admissions=1, ahead=0,
        )  # fmt: skip
        both = [Queue(Session(programs, engine.parameters, shape, prefix_cache=True)) for _ in range(2)]
        both[1].scheduler = Scheduler(shape)
        return both

    return opened


@dataclasses.dataclass(frozen=True)
class Told:
    """What a request was told, and what the drafter proposed behind its prompt."""

    text: list[int]
    logprobs: np.ndarray
    top_logprobs: np.ndarray
    draft: list[int]
    draft_log_probs: np.ndarray
    counts: dict[str, list[int]]


def tell(queue, name, ids, limit) -> Told:
    """Runs a request alone, in slots whose drafter contexts hold what other texts have left there."""
    session = queue.session
    stale = jax.tree.map(lambda ring: ring + 3, session.state.context)
    session.state = dataclasses.replace(session.state, context=stale)
    queue.submit(plan.Request(name, tuple(ids), limit, plan.Settings(logprobs=0)))
    text, logprobs, top, tree = [], [], [], None
    while not queue.idle:
        for event, snapshot in queue.step():
            text += event.tokens
            logprobs.append(snapshot.logprobs[event.slot, : len(event.tokens)])
            top.append(snapshot.top_logprobs[event.slot, : len(event.tokens)])
            if tree is None:
                trees = session.programs.parts[0](session.parameters, session.state, session.now((event.slot,)))
                tree = jax.tree.map(lambda x, slot=event.slot: np.asarray(x)[slot], trees)
            counts = {key: getattr(snapshot, key)[event.slot].tolist() for key in ("round_tokens", "hits", "nodes")}
    return Told(
        text, np.concatenate(logprobs), np.concatenate(top), tree.tokens.tolist(), tree.cum_log_probs, counts
    )  # fmt: skip


def prompts_behind(beginning, size):
    """A prompt for every hit of interest, by its tokens: one page, which is one below a window, then exactly a window,
    one page more, and the longest, which leaves one token to run."""
    rng = np.random.default_rng(1)
    own = {pages * size: rng.integers(0, 300, 20).tolist() for pages in (1, 2, 3)}
    return {hit: [*beginning[:hit], *tail] for hit, tail in own.items()} | {4 * size: beginning[: 4 * size + 1]}


def fill(queue, neighbours=True):
    """A text of four pages and more whose last page is the answer's in part, written beside another's rounds."""
    size = queue.session.programs.page_tokens
    prompt = np.random.default_rng(0).integers(0, 300, 4 * size - 20).tolist()
    texts = {"first": [*prompt], "neighbour": [5, 17, 250]}
    if neighbours:
        queue.submit(plan.Request("neighbour", tuple(texts["neighbour"]), 30))
        queue.step()
    queue.submit(plan.Request("first", tuple(prompt), 30))
    while not queue.idle:
        for event, _ in queue.step():
            texts[event.id] += event.tokens
    return texts["first"]


@pytest.mark.parametrize(
    "mesh",
    [
        "local",
        *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("hgx-ib-16", "hgx-ib-16 split cache")),
        *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in ("nvl72", "nvl72 split cache")),
    ],
)
def test_a_hit_changes_nothing(mesh, queues):
    queue, cold = queues(mesh)
    beginning, size = fill(queue), queue.session.programs.page_tokens
    for hit, prompt in prompts_behind(beginning, size).items():
        before = queue.scheduler.reused_tokens
        got, expected = tell(queue, str(hit), prompt, 12), tell(cold, str(hit), prompt, 12)
        assert queue.scheduler.reused_tokens - before == hit
        assert (got.text, got.draft, got.counts) == (expected.text, expected.draft, expected.counts)
        for name in ("logprobs", "top_logprobs", "draft_log_probs"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=1e-4, err_msg=f"{hit} {name}")
    assert cold.scheduler.reused_tokens == queue.scheduler.drafter_misses == 0


def test_a_context_that_is_not_restored_would_be_seen(queues, monkeypatch):
    """The text stays right without it: only what the drafter says tells."""
    queue, cold = queues()
    beginning = fill(queue, neighbours=False)
    monkeypatch.setattr(queue.session, "_restore", lambda hits: None)
    got, expected = (tell(each, "second", beginning[:257], 12) for each in (queue, cold))
    assert queue.scheduler.reused_tokens == 256
    assert got.text == expected.text
    assert np.abs(got.draft_log_probs - expected.draft_log_probs).max() > 0.1


def test_a_process_that_follows_has_the_same(queues, monkeypatch):
    """It is told the plans, and fills its drafter's contexts from its own pages."""
    queue, other = queues()
    plans, run = [], queue.session.run
    monkeypatch.setattr(queue.session, "run", lambda plan, rows: plans.append(plan.to_json()) or run(plan, rows))
    beginning = fill(queue, neighbours=False)
    queue.submit(plan.Request("second", tuple(beginning[:257]), 12))
    while not queue.idle:
        queue.step()
    assert queue.scheduler.reused_tokens == 256
    for text in plans:
        other.session.run(plan.Plan.from_json(text)).read()
    for ours, theirs in zip(*(jax.tree.leaves(each.session.state) for each in (queue, other)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_pages_that_are_not_finite_are_nobody_elses(queues):
    """An embedding of NaN in the third page of a prompt: the first two were read and found good before that ran."""
    queue, cold = queues()
    poison = jax.tree.map(lambda x: x, queue.session.parameters)
    table = poison["target"]["model"]["embed_tokens"]
    table["weight"] = table["weight"].at[319].set(jnp.nan)
    queue.session.parameters = cold.session.parameters = poison
    prompt = np.random.default_rng(0).integers(0, 300, 150).tolist()
    tell(queue, "bad", [*prompt[:140], 319], 12)
    assert queue.scheduler.reused_tokens == 0
    for pool in jax.tree.leaves(queue.session.state.context_pages):
        assert jnp.isfinite(pool).all()
        assert pool.any()
    got, expected = (tell(each, "good", prompt, 12) for each in (queue, cold))
    assert queue.scheduler.reused_tokens == 0
    assert (got.text, got.draft, got.counts) == (expected.text, expected.draft, expected.counts)


def test_a_run_reuses_what_its_prompts_share_and_says_so(shallow):
    beginning = np.random.default_rng(0).integers(0, 300, 70).tolist()
    requests = [Request([*beginning, number], Sampling(), 0, 4) for number in range(3)]
    report, texts = Report(3), {}
    for share in (True, False):
        engine = dataclasses.replace(shallow(), prefix_cache=share)
        texts[share] = [[], [], []]
        for progress in engine.serve(requests):
            for text, new in zip(texts[share], progress.new_tokens, strict=True):
                text += new
            if share:
                report.add(progress)
    assert texts[True] == texts[False]
    told = report.as_dict()
    assert (told["prompt_tokens"], told["reused_tokens"], told["drafter_misses"]) == (213, 128, 0)
    assert report.summary().endswith("; 128 of 213 prompt tokens reused")
    assert progress.counts.reused_tokens == 0
