import itertools
import json
import math

import pytest

from kimi_jax.estimator import acceptance
from kimi_jax.estimator.acceptance import Acceptance
from kimi_jax.estimator.scenario import default_acceptance


@pytest.mark.parametrize(
    ("length", "block", "rate"), [(4.4, 8, 0.8185), (5.3, 8, 0.878), (7.03, 16, 0.874), (14, 16, 0.982)]
)
def test_rate_of_a_chain(length, block, rate):
    assert acceptance.rate_for_length(length, block) == pytest.approx(rate, abs=1e-3)


@pytest.mark.parametrize("length", [1.0, 8.0, 9.0])
def test_lengths_a_block_cannot_have_are_refused(length):
    with pytest.raises(ValueError, match="between 1 and 8"):
        acceptance.rate_for_length(length, 8)


def best_by_enumeration(rates, budget: int) -> float:
    """Every node of a small tree is listed; the budget takes those with the largest product."""
    depths = range(1, len(rates) + 1)
    paths = [path for d in depths for path in itertools.product(*(range(len(rates[i])) for i in range(d)))]
    chances = sorted((math.prod(rates[i][r] for i, r in enumerate(path)) for path in paths), reverse=True)
    return 1 + sum(chances[:budget])


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 9, 39, 100])
def test_tree_is_the_best_of_all_nodes(budget):
    rates = ((0.6, 0.2, 0.1), (0.5, 0.3, 0.05), (0.7, 0.1, 0.1))
    assert Acceptance((rates,), "table").length(budget) == pytest.approx(best_by_enumeration(rates, budget))


def test_budget_of_one_table_by_hand():
    # Nodes by chance: 0.8, 0.8·0.5 = 0.4, 0.15, 0.15·0.5 = 0.075; the last two lie below a sibling or are one.
    rates = ((0.8, 0.15), (0.5,))
    assert Acceptance((rates,), "table").length(3) == pytest.approx(1 + 0.8 + 0.4 + 0.15)
    halved = Acceptance((rates,), "table", after_sibling=0.5)
    assert halved.length(4) == pytest.approx(1 + 0.8 + 0.4 + 0.15 + 0.15 * 0.25)


@pytest.mark.parametrize(("block", "rate"), [(8, 0.8507), (8, 0.25), (16, 0.7), (16, 0.982)])
def test_constant_rate_keeps_the_chain_and_grows_with_the_budget(block, rate):
    a = default_acceptance(block, rate)
    assert a.chain_length() == pytest.approx(sum(rate**d for d in range(block)), rel=1e-6)
    lengths = [a.length(b) for b in (0, 1, 2, 4, 8, 16, 64, 256)]
    assert lengths[0] == 1
    assert all(low < high for low, high in itertools.pairwise(lengths))
    assert a.length(block - 1) >= a.chain_length() - 1e-9
    assert lengths[-1] <= block


def test_default_is_the_kimi_drafters_card():
    assert default_acceptance().chain_length() == pytest.approx((5.3 + 5.5 + 5.3 + 4.5 + 3.7) / 5, abs=0.005)


def test_measured_hit_rates(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"hit_rates": [[0.8, 0.1], 0.5], "tokens": 7}))
    measured = acceptance.from_file(path, sibling_share=0.5, after_sibling=0.5)
    assert measured.max_depth == 2
    # 0.8, 0.8 · 0.5, the second's sibling 0.8 · 0.25, and so on; of the first depth only what was listed.
    assert measured.length(3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    path.write_text(json.dumps({"results": [], "summary": {"draft_hit_rates": [0.9, 0.5]}}))
    decoded = acceptance.from_file(path, sibling_share=0.5, after_sibling=0.5)
    assert decoded.chain_length() == pytest.approx(1 + 0.9 + 0.45)
    path.write_text(json.dumps({"results": [], "summary": {"draft_hit_rates": []}}))
    with pytest.raises(ValueError, match="hit_rates"):
        acceptance.from_file(path, sibling_share=0.5, after_sibling=0.5)


@pytest.mark.parametrize("rates", [((0.7, 0.5),), ((-0.1,),), ((),)])
def test_rates_that_are_no_chances_are_refused(rates):
    with pytest.raises(ValueError, match="sum to at most 1"):
        Acceptance((rates,), "bad")


def test_rate_outside_zero_to_one_is_refused():
    with pytest.raises(ValueError, match="hit rate is 1"):
        default_acceptance(8, 1.2)
