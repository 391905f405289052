"""Costs of a round as the decode loop takes them: those of the very layout that decodes."""

import dataclasses

import pytest

from kimi_jax.estimator.rounds import round_costs
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.step import estimate
from kimi_jax.ledger.models import k26, kimi_drafter
from meshes import gpu, preset


def rounds_ms(machine, *, context: int, rows: int) -> float:
    costs = round_costs(machine, gpu("gb300"), k26(), kimi_drafter(), requests=64, context=context)
    return costs.microseconds[rows] / 1e3


@pytest.mark.parametrize(("cache", "ms"), [("copied", 37.89), ("split", 17.39)])
def test_costs_follow_the_cache(cache, ms):
    """64 requests of 262,144 tokens on nvl72: a rank reads 147 GB of latents, or an eighth of them."""
    machine = preset("nvl72").with_options(cache=cache)
    s = make_scenario(machine, gpu("gb300"), concurrency=64, context=262_144)
    assert estimate(s).memory.cache == pytest.approx(8 * 262_144 * 70_272 / machine.layout.cache_ranks)
    cost = rounds_ms(machine, context=262_144, rows=1)
    assert cost == pytest.approx(estimate(s).step_ms)
    assert cost == pytest.approx(ms, abs=0.01)


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_costs_follow_the_exchange(exchange):
    machine = preset("nvl72").with_options(exchange=exchange)
    named = rounds_ms(machine, context=8192, rows=16)
    auto = rounds_ms(preset("nvl72"), context=8192, rows=16)
    assert (named == auto) is (exchange == "alltoall")


def test_round_costs_of_another_model():
    small = dataclasses.replace(k26(), num_hidden_layers=31)
    whole = round_costs(preset("nvl72"), gpu("gb300"), k26(), kimi_drafter(), requests=64, context=8192)
    half = round_costs(preset("nvl72"), gpu("gb300"), small, kimi_drafter(), requests=64, context=8192)
    assert 0.4 < half.microseconds[1] / whole.microseconds[1] < 0.6
