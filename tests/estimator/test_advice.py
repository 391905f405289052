"""What is said of a run: how much fits, and what would be faster."""

import dataclasses
import re

import pytest

from kimi_jax.estimator.advice import better, most_requests, scenario_of
from kimi_jax.estimator.search import recommend
from kimi_jax.estimator.step import estimate
from kimi_jax.ledger.models import k26, kimi_drafter
from meshes import GPUS, preset


def load(mesh="nvl72", gpu="gb300", requests=64, context=8192):
    return scenario_of(preset(mesh), GPUS[gpu], k26(), kimi_drafter(), requests=requests, context=context)


def test_the_preset_s_layout_with_a_small_tree_is_told_what_is_faster():
    scenario = load()
    line = better(scenario, rows=5)
    now, best = (float(x.replace(",", "")) for x in re.findall(r"([\d,]+)(?: tokens/s instead| on gb300)", line)[::-1])
    assert now == pytest.approx(estimate(dataclasses.replace(scenario, budget=4)).tokens_per_s_per_user, abs=0.5)
    assert best == pytest.approx(recommend(scenario.preset, scenario).best.tokens_per_s_per_user, abs=0.5)
    assert best > 1.05 * now
    assert "decode.py --mesh nvl72" in line


def test_the_best_is_left_alone():
    best = recommend(preset("nvl72"), load()).best.scenario
    assert better(dataclasses.replace(best, budget=0), rows=1 + best.budget) is None


def test_requests_fit_as_the_estimate_counts_them():
    scenario = load()
    assert most_requests(scenario) == estimate(scenario).memory.max_requests > 64


def test_a_text_that_does_not_fit_alone_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"fits on hgx-ib-8 with h100: its cache takes 18.4 GB .* 85.5 GB"):
        most_requests(load("hgx-ib-8", "h100", context=262_144))
