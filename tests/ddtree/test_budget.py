"""Shared budgets against plain enumeration, on one device and over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kimi_jax.ddtree.budget import share_nodes


def trees(requests: int, rows: int, seed: int = 0) -> np.ndarray:
    """Cumulative log-probabilities as a tree's, the last request's with padding."""
    rng = np.random.default_rng(seed)
    cum = -np.sort(rng.exponential(2, size=(requests, rows)).cumsum(axis=-1) * rng.uniform(0.05, 1, (requests, 1)))
    cum[:, 0] = 0
    cum[-1, rows // 2 :] = -np.inf
    return cum.astype(np.float32)


def test_padding_and_finished_requests_take_no_rows():
    """Only request 1 is active, and its tree has 15 nodes."""
    assert share_nodes(jnp.asarray(trees(2, 32)), jnp.array([False, True]), 31).tolist() == [0, 15]


@pytest.mark.parametrize("total", [0, 1, 10, 60, 1000])
def test_shared_budget_takes_the_best_of_the_batch(total):
    cum = trees(4, 33)
    active = np.array([True, True, False, True])
    got = np.asarray(jax.jit(share_nodes)(cum, active, total))
    pool = sorted((-p, r) for r in range(4) if active[r] for p in cum[r, 1:] if np.isfinite(p))[:total]
    assert got.tolist() == [sum(r == owner for _, owner in pool) for r in range(4)]


def test_a_sharded_batch_shares_as_one():
    cum = trees(4, 33)
    active = np.array([True, True, False, True])
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "tp"))
    batch = PartitionSpec("ep")
    sharded = jax.shard_map(
        lambda cum, active: share_nodes(cum, active, 40),
        mesh=mesh, in_specs=(batch, batch), out_specs=batch, check_vma=False,
    )  # fmt: skip
    shares = jax.jit(sharded)(cum, active)
    assert shares.tolist() == share_nodes(cum, active, 40).tolist()
    assert int(shares.sum()) == 40
