"""The simulation of serving against queueing theory and against times worked out by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.serving import EstimatedCosts, Machine, disaggregated, simulate
from kimi_jax.estimator.step import estimate
from kimi_jax.serving.arrivals import Arrival, Lengths, poisson
from kimi_jax.serving.plan import Shape
from meshes import Layout, gpu, preset

CHUNK_MS, ROUND_MS = 100.0, 10.0


def fixed(requests, context, rounds, chunks, seen):
    """A round, and a chunk however long, take the same times always."""
    return rounds * ROUND_MS + (CHUNK_MS if any(chunks) else 0.0)


def machine(**fields: Any) -> Machine:
    sizes: dict[str, Any] = {
        "groups": 1,
        "slots_per_group": 1,
        "pages": 16,
        "page_tokens": 64,
        "tiles": 16,
        "lanes": 1,
        "chunk": 512,
    }
    sizes |= {"depth": 0, "ahead": 0} | fields
    return Machine(Shape(**sizes), fixed, gpus=8, acceptance=1.0)


def waits(gaps: np.ndarray, service: float) -> np.ndarray:
    """Lindley's recursion for a single server: what each waits that comes after such gaps."""
    steps = np.cumsum(np.concatenate([[0.0], service - gaps[1:]]))
    return steps - np.minimum.accumulate(steps)


@pytest.mark.parametrize("load", [0.5, 0.8, 0.95])
def test_one_slot_with_fixed_prompts_is_the_queue_m_d_1(load):
    """Each request waits what Lindley's recursion says, whose mean is the closed form ρ / 2(1 − ρ) of service times."""
    service = CHUNK_MS / 1e3
    arrivals = poisson(2000, load / service, Lengths(100), Lengths(1), seed=1)
    found = simulate(machine(), arrivals, warm_up=0)
    gaps = np.diff([each.seconds for each in arrivals], prepend=0.0)
    assert [each.ttft - service for each in found.served] == pytest.approx(waits(gaps, service).tolist(), abs=1e-9)
    many = np.random.default_rng(0).exponential(service / load, 5_000_000)
    assert waits(many, service).mean() == pytest.approx(load / (2 * (1 - load)) * service, rel=0.03)


def test_one_client_by_hand():
    """Two chunks for 600 tokens, then rounds of exactly 2 tokens: 10 for the 20 after the first."""
    one = dataclasses.replace(machine(depth=1), acceptance=2.0)
    found = simulate(one, [Arrival(0.0, 600, 21)] * 4, in_flight=1, acceptance_sigma=0, warm_up=0)
    for each in found.served:
        assert each.ttft == pytest.approx(2 * CHUNK_MS / 1e3)
        assert each.tpot == pytest.approx(ROUND_MS / 2 / 1e3)
    assert found.tokens_per_s == pytest.approx(21 / (2 * CHUNK_MS + 10 * ROUND_MS) * 1e3, rel=0.01)
    assert found.busy == pytest.approx(1)
    assert found.goodput(ttft=0.3, speed=150) == 1
    assert found.goodput(ttft=0.1, speed=150) == found.goodput(ttft=0.3, speed=250) == 0


def test_twice_the_replicas_and_twice_the_load_keep_the_times():
    lengths = Lengths(2000, 0.3, 4000), Lengths(60, 0.3, 120)

    def served(replicas: int):
        place = preset("hgx-ib-16").with_layout(Layout(dp=replicas, tp=8, experts="width"))
        s = make_scenario(place, gpu("b300"), concurrency=1, context=1, budget=7)
        return simulate(Machine.of(s, 16 * replicas, 5000), poisson(200, 2.0 * replicas, *lengths))

    one, two = served(1), served(2)
    assert two.tokens_per_s == pytest.approx(2 * one.tokens_per_s)
    for figure in ("ttft", "tpot"):
        assert two.percentile(figure, 90) == pytest.approx(one.percentile(figure, 90))


def test_a_share_of_the_groups_stands_for_all():
    lengths = Lengths(100, 0.3, 200), Lengths(40, 0.3, 80)
    arrivals = poisson(600, 6.0, *lengths)
    shape = {"slots_per_group": 4, "pages": 64, "groups": 2}
    whole = simulate(machine(**shape), arrivals)
    half = simulate(dataclasses.replace(machine(**shape), share=0.5), poisson(600, 12.0, *lengths))
    assert half.tokens_per_s == pytest.approx(2 * whole.tokens_per_s, rel=0.02)
    assert half.mean("ttft") == pytest.approx(whole.mean("ttft"), rel=0.02)
    assert half.requests == pytest.approx(2 * whole.requests, rel=0.02)


def test_pages_bound_what_is_at_work():
    """8 slots but pages for two requests of 3 pages each, all there from the start."""
    arrivals = poisson(40, None, Lengths(150), Lengths(30))
    bounded = simulate(machine(slots_per_group=8, pages=6), arrivals, warm_up=0)
    free = simulate(machine(slots_per_group=8, pages=64), arrivals, warm_up=0)
    assert bounded.requests <= 2.0 < free.requests
    assert bounded.queued > free.queued


def test_a_shared_beginning_is_found_in_kept_pages():
    arrivals = poisson(50, None, Lengths(200), Lengths(10))
    found = simulate(machine(pages=64), arrivals, shared_prefix=128, warm_up=0)
    assert found.reused == pytest.approx(49 / 50 * 128 / 200)
    assert simulate(machine(pages=64), arrivals, warm_up=0).reused == 0


def test_prompts_elsewhere_do_not_stop_rounds():
    s = make_scenario(preset("hgx-ib-8").with_axes(tp=8), gpu("b300"), concurrency=8, context=400)
    arrivals = poisson(400, 5.0, Lengths(300), Lengths(50))
    mixed = simulate(machine(slots_per_group=8, pages=128), arrivals)
    split = disaggregated(machine(slots_per_group=8, pages=128), s, arrivals, 1)
    # Rounds of one token each, and 300 tokens of 70,272 bytes over 88 % of 100 GB/s once; beside that a request waits
    # at most for the end of 8 rounds that run as it comes.
    least = ROUND_MS / 1e3 + 300 * 70_272 / 88e9 / 49
    assert min(each.tpot for each in split.served) >= least - 1e-9
    assert split.mean("tpot") <= least + 8 * ROUND_MS / 1e3 / 49
    assert mixed.mean("tpot") > 1.5 * split.mean("tpot")
    assert split.gpus == 16
    assert len(split.served) == len(mixed.served) == 360
    assert all(each.arrived < each.first < each.ended for each in split.served)


def test_costs_are_the_estimates():
    layout = Layout(ep=8)
    s = make_scenario(preset("hgx-ib-8").with_layout(layout), gpu("b300"), concurrency=1, context=1, budget=7)
    costs = EstimatedCosts(s)

    def ms(**fields) -> float:
        return estimate(dataclasses.replace(s, **fields)).step_ms

    assert costs(64, 8192, 2, [0] * 8, 0) == pytest.approx(2 * ms(concurrency=64, context=8192))
    chunked = {"context": 8192, "chunk": 512, "chunk_context": 2048}
    assert costs(64, 8192, 1, [512] * 8, 2048) == pytest.approx(ms(concurrency=64, **chunked))
    assert costs(0, 0, 0, [512] * 8, 2048) == pytest.approx(ms(concurrency=0, budget=0, **chunked | {"context": 1}))
    # One group of eight prefills: its dense parts take as long, experts and exchange have an eighth of the rows.
    assert (
        ms(concurrency=64, context=8192)
        < costs(64, 8192, 1, [512] + [0] * 7, 2048)
        < costs(64, 8192, 1, [512] * 8, 2048)
    )


def test_what_does_not_fit_is_refused():
    s = make_scenario(preset("hgx-ib-8").with_axes(tp=8), gpu("h100"), concurrency=1, context=1)
    with pytest.raises(ValueError, match="a request of 500000 tokens does not fit in the memory of hgx-ib-8 with h100"):
        Machine.of(s, 8, 500_000)
    with pytest.raises(ValueError, match="rate is 0; it must be more than 0"):
        poisson(10, 0.0, Lengths(1), Lengths(1))
