"""Choosing budgets: against plain enumeration, at both ends of cost, and over batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kimi_jax.ddtree.budget import (
    ROW_COUNTS,
    CostTable,
    choose_num_nodes,
    drafting_pays,
    expected_distinct_experts,
    fastest_mode,
    row_count_index,
    share_nodes,
)
from kimi_jax.ddtree.tree import build_tree

KIMI = {"num_experts": 384, "experts_per_token": 8}


def trees(requests: int, rows: int, seed: int = 0) -> np.ndarray:
    """Cumulative log-probabilities as a tree's, the last request's with padding."""
    rng = np.random.default_rng(seed)
    cum = -np.sort(rng.exponential(2, size=(requests, rows)).cumsum(axis=-1) * rng.uniform(0.05, 1, (requests, 1)))
    cum[:, 0] = 0
    cum[-1, rows // 2 :] = -np.inf
    return cum.astype(np.float32)


def test_distinct_experts():
    """The published figures of the formula: 384 experts, 8 a token."""
    got = expected_distinct_experts(np.array([1, 9, 17, 33, 65, 129]), 384, 8)
    np.testing.assert_allclose(got, [8, 66.3, 115.5, 192.3, 286.3, 358.6], atol=0.5)


def test_roofline_adds_up():
    table = CostTable.roofline(
        draft_us=500, fixed_us=1000, row_us=2, expert_bytes=1e6, bandwidth_gb_s=1000, requests=3, **KIMI
    )
    for rows, compiled in ((1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (64, 64)):
        distinct = 384 * (1 - (1 - 8 / 384) ** (3 * rows))
        np.testing.assert_allclose(table.verify_us[rows - 1], 1000 + 3 * compiled * 2 + distinct * 1.0, rtol=1e-6)
    assert table.verify_us.shape == (64,)
    assert table.plain_us == table.verify_us[0]
    np.testing.assert_allclose(table.round_us(0), 500 + table.verify_us[0])


def test_measured_interpolates_and_never_falls():
    table = CostTable.measured(draft_us=10, verify_us={1: 100, 5: 140, 8: 130, 10: 150}, plain_us=90)
    np.testing.assert_allclose(table.verify_us, [100, 110, 120, 130, 140, 140, 140, 140, 145, 150])
    assert table.plain_us == 90


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CostTable.measured(draft_us=1, verify_us={2: 1}), "1 row must be among them"),
        (lambda: CostTable.measured(draft_us=1, verify_us={1: 0}), "must be positive"),
        (lambda: row_count_index(jnp.array(1), (8, 1)), "must be positive and rising"),
        (lambda: CostTable.roofline(draft_us=-1, fixed_us=1, row_us=1, expert_bytes=1, bandwidth_gb_s=1, **KIMI),
         "must not be negative"),
    ],
)  # fmt: skip
def test_bad_costs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_choice_is_the_best_of_all():
    """20 batches with a steep to a flat cost, against enumeration in float64."""
    choose = jax.jit(choose_num_nodes)
    chosen = set()
    for seed in range(20):
        cum, rng = trees(3, 40, seed), np.random.default_rng(seed)
        active = np.array([True, bool(seed % 2), True])
        table = CostTable.roofline(
            draft_us=200, fixed_us=800, row_us=1, expert_bytes=10 ** rng.uniform(4, 7), bandwidth_gb_s=3000, **KIMI
        )
        tokens = np.cumsum(np.exp(cum[active].astype(np.float64)).sum(axis=0))
        rate = tokens / (200 + np.asarray(table.verify_us[:40], np.float64))
        got = int(choose(cum, active, table))
        assert rate[got] >= rate.max() * (1 - 1e-6)
        chosen.add(got)
    assert len(chosen) > 4
    assert min(chosen) < 8 < max(chosen)


def test_free_rows_take_all_nodes_and_dear_rows_none():
    cum = np.float32([-0.1, -0.2])[:, None] * np.arange(32, dtype=np.float32)
    on = np.ones(2, bool)
    flat = CostTable.measured(draft_us=1, verify_us={1: 100, 64: 100})
    steep = CostTable.measured(draft_us=1, verify_us={1: 1, 2: 1e4, 64: 1e6})
    assert int(choose_num_nodes(cum, on, flat)) == 31
    assert int(choose_num_nodes(cum, on, steep)) == 0


def test_padding_and_finished_requests_take_no_rows():
    """Only request 1 is active, and its tree has 15 nodes: rows past them gain nothing even where they are free."""
    cum = trees(2, 32)
    flat = CostTable.measured(draft_us=1, verify_us={1: 100, 64: 100})
    assert int(choose_num_nodes(cum, np.array([False, True]), flat)) <= 15
    assert share_nodes(jnp.asarray(cum), jnp.array([False, True]), 31).tolist() == [0, 15]


def test_more_devices_for_the_experts_buy_more_nodes():
    """Kimi's experts on 8 and on 72 devices: 60 layers of 24.77 MB, 80 % of 8 TB/s, a drafter with a = 0.82."""
    position = np.float32([0.82, 0.08, 0.04, 0.02, 0.01, 0.01, 0.01, 0.01])
    cum = jax.jit(build_tree, static_argnums=1)(np.log(np.tile(position, (7, 1))), 63).cum_log_probs[None]
    nodes = []
    for devices in (8, 72):
        table = CostTable.roofline(
            draft_us=1500, fixed_us=11000, row_us=0, expert_bytes=60 * 24.77e6 / devices, bandwidth_gb_s=6400, **KIMI
        )
        nodes.append(int(choose_num_nodes(cum, np.ones(1, bool), table)))
    assert 7 <= nodes[0] <= 15
    assert nodes[1] > 2 * nodes[0]


@pytest.mark.parametrize("total", [0, 1, 10, 60, 1000])
def test_shared_budget_takes_the_best_of_the_batch(total):
    cum = trees(4, 33)
    active = np.array([True, True, False, True])
    got = np.asarray(jax.jit(share_nodes)(cum, active, total))
    pool = sorted((-p, r) for r in range(4) if active[r] for p in cum[r, 1:] if np.isfinite(p))[:total]
    assert got.tolist() == [sum(r == owner for _, owner in pool) for r in range(4)]


def test_sharded_batch_chooses_and_shares_as_one():
    cum = trees(4, 33)
    active = np.array([True, True, False, True])
    table = CostTable.measured(draft_us=50, verify_us={1: 100, 64: 900})
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))

    def step(cum, active):
        return choose_num_nodes(cum, active, table), share_nodes(cum, active, 40)

    batch = PartitionSpec("ep")
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(batch, batch), out_specs=(PartitionSpec(), batch), check_vma=False
    )
    nodes, shares = jax.jit(sharded)(cum, active)
    assert int(nodes) == int(choose_num_nodes(cum, active, table))
    assert shares.tolist() == share_nodes(cum, active, 40).tolist()
    assert int(shares.sum()) == 40


def test_row_counts():
    got = [int(row_count_index(jnp.array(n))) for n in (0, 1, 7, 8, 15, 23, 24, 31, 32, 63, 64)]
    assert [ROW_COUNTS[i] for i in got] == [1, 8, 8, 16, 16, 24, 32, 32, 64, 64, 64]
    assert int(row_count_index(jnp.array([3, 20, 0]))) == 3


def test_fallbacks():
    """A chain of 7 and a tree of 31, on a machine where rows are cheap and on one where they are dear."""
    cheap = CostTable.measured(draft_us=20, verify_us={1: 100, 64: 120})
    dear = CostTable.measured(draft_us=20, verify_us={1: 100, 8: 200, 64: 1500})
    measured = {"chain_tokens": 3.0, "chain_nodes": 7, "tree_tokens": 3.8, "tree_nodes": 31}
    assert fastest_mode(cheap, **measured) == "tree"
    assert fastest_mode(dear, **measured) == "chain"
    assert fastest_mode(dear, **measured | {"chain_tokens": 1.5, "tree_tokens": 2.0}) == "plain"
    assert bool(drafting_pays(3.0, 7, dear))
    assert not bool(drafting_pays(2.1, 7, dear))
