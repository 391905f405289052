import json

import numpy as np
import pytest

from kimi_jax.ledger import routing


@pytest.mark.parametrize(("rows", "distinct"), [(1, 8.0), (9, 66.28), (17, 115.5), (33, 192.31), (256, 382.2)])
def test_distinct_experts_under_uniform_routing(rows, distinct):
    assert routing.uniform(384, 8).distinct_experts(rows) == pytest.approx(distinct, abs=0.05)


def test_zipf_lies_below_uniform_and_nears_it():
    uniform = routing.uniform(384, 8).distinct_experts(48)
    assert routing.zipf(384, 8, 150).distinct_experts(48) / uniform == pytest.approx(0.965, abs=0.01)
    assert routing.zipf(384, 8, 1e6).distinct_experts(48) == pytest.approx(uniform, rel=1e-4)


def picks(rng, rows: int) -> np.ndarray:
    return np.argsort(rng.random((rows, 384)), axis=1)[:, :8]


@pytest.mark.parametrize("ranks", [8, 32, 64])
@pytest.mark.parametrize("rows", [1, 9, 33, 264])
def test_busiest_rank_against_simulated_routing(rows, ranks):
    rng = np.random.default_rng(rows * ranks)
    experts, shares = [], []
    for _ in range(300):
        chosen = picks(rng, rows)
        experts.append(np.bincount(np.unique(chosen) * ranks // 384, minlength=ranks).max())
        shares.append(np.bincount(chosen.ravel() * ranks // 384, minlength=ranks).max() / (rows * 8 / ranks))
    distinct = routing.uniform(384, 8).distinct_experts(rows)
    most = routing.busiest_rank_experts(distinct, 384, 384 // ranks, ranks)
    assert most == pytest.approx(np.mean(experts), rel=0.08)
    # The share uses a normal approximation, which overshoots where a rank has less than a pair on average.
    assert routing.busiest_rank_share(rows * 8, ranks, 1.0) == pytest.approx(np.mean(shares), rel=0.25)


def test_rows_of_a_tree_may_be_alike():
    alike = routing.uniform(384, 8, tree_diversity=0.5)
    assert alike.effective_rows(2, 9) == 2 * (1 + 0.5 * 8)
    assert alike.effective_rows(2, 1) == 2


def test_measured_counts(tmp_path):
    counts = np.ones(384)
    counts[:8] = 1e9  # the same eight experts every time
    assert routing.measured(counts, 8).distinct_experts(100) == pytest.approx(8, abs=0.01)
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([[1] * 384, [3] * 384]))
    assert routing.from_file(path, 384, 8).distinct_experts(9) == pytest.approx(66.28, abs=0.05)
    path.write_text(json.dumps([1, 2, 3]))
    with pytest.raises(ValueError, match=r"shape \(1, 3\), expected 384 counts"):
        routing.from_file(path, 384, 8)
    with pytest.raises(ValueError, match="non-negative"):
        routing.measured(-counts, 8)
