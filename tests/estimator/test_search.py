import dataclasses
import math
from typing import Any

import pytest

from kimi_jax.estimator import search
from kimi_jax.estimator.scenario import Prefill, make_scenario
from kimi_jax.estimator.step import estimate
from meshes import LayoutError, gpu

BUDGETS = (0, 7, 16)


def scenario(family: search.Family = "hgx", gpus=8, card="b300", concurrency=1, context=8192, **options):
    machine = search.machine_of(family, gpus)
    return machine, make_scenario(machine, gpu(card), concurrency=concurrency, context=context, **options)


def test_layouts_are_all_possible_and_different():
    machine, s = scenario("nvl", 72, "gb300")
    found = [candidate.layout for candidate in search.layouts(machine, s)]
    assert len(set(found)) == len(found)
    assert {layout.tp for layout in found} == {1, 2, 4, 8, 16, 32, 64}
    sizes = {layout.num_devices for layout in found}
    assert sizes == {64, 72}
    assert {layout.tp for layout in found if layout.num_devices == 64} == {16, 32, 64}


def test_recommendation_beats_every_candidate():
    machine, s = scenario("nvl", 16, "gb300", concurrency=64)
    r = search.recommend(machine, s, budgets=BUDGETS)
    for candidate in search.layouts(machine, s):
        for budget in BUDGETS:
            e = estimate(dataclasses.replace(s, preset=candidate, budget=budget))
            assert e.tokens_per_s_per_user <= r.best.tokens_per_s_per_user
    assert r.runner_up is not None
    axes = [tuple(e.scenario.preset.layout.axis_sizes.values()) for e in (r.best, r.runner_up)]
    assert axes[0] != axes[1]
    assert r.margin == pytest.approx(r.best.tokens_per_s_per_user / r.runner_up.tokens_per_s_per_user - 1)
    assert r.is_certain == (r.margin > 0.30)
    assert r.reasons


def test_throughput_keeps_every_user_fast_enough():
    machine, s = scenario()
    loads = (1, 16, 256, 1024)
    free = search.recommend(machine, s, "throughput", BUDGETS, loads)
    bound = search.recommend(machine, s, "throughput", BUDGETS, loads, least_tokens_per_s_per_user=100)
    assert bound.best.tokens_per_s_per_user >= 100
    assert free.best.tokens_per_s > bound.best.tokens_per_s
    with pytest.raises(ValueError, match="no layout of hgx-ib-8 gives every user 100000 tokens/s: the fastest gives"):
        search.recommend(machine, s, "throughput", BUDGETS, loads, least_tokens_per_s_per_user=100_000)


def test_nothing_fits_says_by_how_much():
    machine, s = scenario(concurrency=8192)
    with pytest.raises(ValueError, match=r"no layout of hgx-ib-8 holds 8192 requests.*GB a GPU over and holds \d+ req"):
        search.recommend(machine, s, budgets=BUDGETS)


def test_many_requests_leave_tp_for_data_parallel_attention():
    machine, few = scenario(concurrency=1)
    _, many = scenario(concurrency=1024)
    assert search.recommend(machine, few, budgets=BUDGETS).best.scenario.preset.layout.tp == 8
    assert search.recommend(machine, many, budgets=BUDGETS).best.scenario.preset.layout.ep == 8


def test_best_budget_is_the_largest_ratio():
    _, s = scenario()
    best = search.best_budget(s, (0, 4, 7, 16, 64))
    speeds = {b: estimate(dataclasses.replace(s, budget=b)).tokens_per_s_per_user for b in (0, 4, 7, 16, 64)}
    assert best.scenario.budget == max(speeds, key=lambda b: speeds[b])


def test_compare_and_crossovers():
    left, right = scenario("hgx", 8, "b300"), scenario("nvl", 8, "gb300")
    rows = search.compare(left, right, (1, 64, 1_000_000), (7,))
    assert [row.concurrency for row in rows] == [1, 64, 1_000_000]
    assert rows[0].left is not None
    assert rows[0].right is not None
    assert rows[0].ratio == pytest.approx(rows[0].right.tokens_per_s_per_user / rows[0].left.tokens_per_s_per_user)
    assert rows[0].verdict == "too close to tell"
    assert rows[2].verdict == "neither fits"
    changes = search.crossovers(rows, "left")
    assert changes[0] == (1, str(rows[0].left.scenario.preset.layout))
    assert changes[-1] == (1_000_000, "does not fit")
    slow = dataclasses.replace(left[1].gpu, hbm_bytes_per_s=1e12)
    halved = search.compare((left[0], dataclasses.replace(left[1], gpu=slow)), right, (1,), (7,))
    assert halved[0].verdict == "nvl72 faster"
    # One stream takes 16 GPUs of a rack as one tp group, which nobody has published a speed of.
    assert search.compare(left, scenario("nvl", 16, "gb300"), (1,), (7,))[0].verdict == "no band known"


def test_machines_by_size():
    assert search.machine_of("hgx", 16).name == "hgx-ib-16"
    assert search.machine_of("nvl", 36).name == "nvl36"
    assert search.machine_of("nvl", 16).layout.num_devices == 16
    with pytest.raises(LayoutError, match="hgx-ib-32 or hgx-ib-40"):
        search.machine_of("hgx", 36)


def test_pareto_front():
    machine, s = scenario()
    loads = [dataclasses.replace(s, concurrency=load) for load in (1, 8, 64)]
    every = [e for load in loads for e in search.candidates(machine, load, (7,))]
    front = search.pareto(every)
    assert 2 <= len(front) < len(every)
    for e in every:
        assert not any(
            e.tokens_per_s_per_user > f.tokens_per_s_per_user and e.tokens_per_s_per_gpu > f.tokens_per_s_per_gpu
            for f in front
        )


def test_what_is_fixed_stays():
    machine, s = scenario("nvl", 72, "gb300", concurrency=64)
    fixed = search.Fixed(ep=9, exchange="alltoall")
    found = [candidate.layout for candidate in search.layouts(machine, s, fixed)]
    assert found
    assert {(layout.ep, layout.exchange) for layout in found} == {(9, "alltoall")}
    assert search.recommend(machine, s, budgets=(7,), fixed=fixed).best.scenario.preset.layout.ep == 9
    with pytest.raises(ValueError, match="leave an axis free"):
        search.recommend(machine, s, budgets=(7,), fixed=search.Fixed(tp=3))


def test_budgets_are_climbed_to_the_best_of_all():
    for load in (1, 64, 512):
        _, s = scenario(concurrency=load)
        every = [estimate(dataclasses.replace(s, budget=budget)) for budget in search.BUDGETS]
        most = max(e.tokens_per_s_per_user for e in every)
        assert search.best_budget(s).tokens_per_s_per_user == most
    assert set(range(1, 8)) < set(search.BUDGETS)


def test_cost_at_a_speed_and_a_first_token():
    machine, s = scenario(prefill=Prefill(8192, 1024))
    loads = (1, 4, 16, 64, 256)
    asked: dict[str, Any] = {"budgets": (0, 4, 7), "least_tokens_per_s_per_user": 60}
    free = search.recommend(machine, s, "cost", concurrencies=loads, **asked).best
    points = search.operating_points(machine, s, (0, 4, 7), loads)
    assert free.tokens_per_s_per_gpu == max(
        e.tokens_per_s_per_gpu for e in points if e.tokens_per_s_per_user >= 60
    )  # fmt: skip
    soon = search.recommend(machine, s, "cost", concurrencies=loads, ttft=0.8 * free.ttft_s, **asked).best
    assert soon.ttft_s <= 0.8 * free.ttft_s
    assert soon.tokens_per_s_per_gpu < free.tokens_per_s_per_gpu
    assert search.at_speed(points, 60, 0.8 * free.ttft_s) == soon
    with pytest.raises(ValueError, match=r"within 0.001 s at 60 tokens/s for every user: the least is 0\.\d"):
        search.recommend(machine, s, "cost", concurrencies=loads, ttft=1e-3, **asked)
    once, twice = (search.dollars_per_million(free, price) for price in (3.0, 6.0))
    assert twice == pytest.approx(2 * once)
    assert once == pytest.approx(3.0 / (3600 * free.tokens_per_s_per_gpu) * 1e6)


def test_first_tokens_wait_as_in_the_queue_m_d_1():
    """4 chunks of 2,048 beside steps; in use for the share of steps that a prompt for every answer needs."""
    _, s = scenario(concurrency=8, prefill=Prefill(8192, 1024, 2048), budget=0)
    e = estimate(s)
    use = 8 / 1024 * 8192 / 2048
    assert e.prefill.use == pytest.approx(use)
    assert e.ttft_s == pytest.approx(4 * e.prefill.mixed_ms / 1e3 * (1 + use / (2 * (1 - use))))
    assert math.isinf(estimate(dataclasses.replace(s, concurrency=1024)).ttft_s)
