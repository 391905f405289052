import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.int4_moe import Stack, int4_moe
from pallas_kernels.int4_moe.reference import dequantize, int4_moe_reference
from pallas_kernels.int4_moe.routing import combine, gather_rows, group_pairs, tile_bound

problems = runpy.run_path(str(Path(__file__).with_name("problems.py")))
Problem, relative_error = problems["Problem"], problems["relative_error"]

ROUTINGS = ("random", "one expert", "every expert once", "the same experts", "foreign")


compiled = jax.jit(int4_moe_reference, static_argnames="form")


def reference(problem, x, ids, weights, form=None):
    return compiled(x, ids, weights, *problem.weights(), form=form)


@pytest.mark.parametrize("form", ["pairs", "dense", "tiles"])
@pytest.mark.parametrize("rows", [0, 1, 7, 33])
def test_matches_numpy(rows, form):
    problem = Problem(slots=6, hidden=64, width=96, seed=rows)
    x = problem.activations(rows)
    ids, weights = problem.routing(rows, 3)
    # Float32 sums of 64 to 96 products against float64.
    assert relative_error(reference(problem, x, ids, weights, form), problem.expected(x, ids, weights)) < 2e-6


@pytest.mark.parametrize("form", ["pairs", "dense", "tiles"])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_adversarial_routing(kind, form):
    problem = Problem(slots=5, hidden=64, width=64, seed=3)
    x = problem.activations(40)
    ids, weights = problem.routing(40, 4, kind)
    got = reference(problem, x, ids, weights, form)
    assert relative_error(got, problem.expected(x, ids, weights)) < 2e-6
    if kind == "foreign":
        assert not np.any(got)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 257])
def test_many_rows(rows):
    problem = Problem(slots=12, hidden=128, width=64, seed=9)
    x = problem.activations(rows)
    ids, weights = problem.routing(rows, 8)
    assert relative_error(reference(problem, x, ids, weights), problem.expected(x, ids, weights)) < 2e-6


def test_dequantize_follows_the_published_format():
    # compressed-tensors 0.20.1, pack_quantized: value j of a row at bits 4 (j % 8) of word j // 8, code q + 8.
    word = np.uint32(0x76543210).view(np.int32)
    got = dequantize(jnp.full((1, 4), word), jnp.full((1, 1), 0.5, jnp.bfloat16))
    np.testing.assert_array_equal(got[0, :8], (np.arange(8) - 8) * 0.5)


@pytest.mark.parametrize("form", ["pairs", "dense", "tiles"])
def test_extreme_codes_and_scales(form):
    problem = Problem(slots=3, hidden=64, width=64, seed=4)
    problem.codes[0][:] = 0  # q = -8, which Moonshot's own quantiser never writes
    problem.scales[1][0] = 0  # an expert whose up projection is zero
    problem.scales[2][1] = 2.0**100
    x = problem.activations(9)
    ids, weights = np.tile([0, 2, -1], (9, 1)).astype(np.int32), np.ones((9, 3), np.float32)
    assert relative_error(reference(problem, x, ids, weights, form), problem.expected(x, ids, weights)) < 2e-6
    huge = np.tile([1], (9, 1)).astype(np.int32)
    got = reference(problem, x, huge, np.ones((9, 1), np.float32), form)
    assert relative_error(got, problem.expected(x, huge, np.ones((9, 1), np.float32))) < 2e-6


@pytest.mark.parametrize("form", ["pairs", "dense", "tiles"])
def test_an_infinite_foreign_row_stays_out(form):
    """A pair that is not here must not leak, not even as 0 x infinity; nor may one row reach another."""
    problem = Problem(slots=4, hidden=64, width=64, seed=5)
    x = problem.activations(6)
    x[2] = np.inf
    ids, weights = problem.routing(6, 2, "the same experts")
    ids[2] = -1
    weights[2] = np.nan
    got = np.asarray(reference(problem, x, ids, weights, form))
    keep = [0, 1, 3, 4, 5]
    assert not got[2].any()
    assert relative_error(got[keep], problem.expected(x[keep], ids[keep], weights[keep])) < 2e-6


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("rows", [3, 80])
def test_experts_over_ranks_sum_to_the_whole(rows, check_vma):
    """Under shard_map, where the ranks' loops differ in length, the partial results add up to one device's."""
    problem = Problem(slots=8, hidden=64, width=64, seed=6)
    x = problem.activations(rows)
    ids, weights = problem.routing(rows, 4, "random")
    ids = np.clip(ids, 0, 7)
    mesh = Mesh(np.array(jax.devices()[:4]), ("ep",))

    def rank(x, ids, weights, *shards):
        local = ids - 2 * jax.lax.axis_index("ep")
        form = "tiles" if rows > 16 else None
        return jax.lax.psum(int4_moe_reference(x, local, weights, *shards, form=form), "ep")

    split = PartitionSpec("ep")
    whole = PartitionSpec()
    mapped = jax.shard_map(rank, mesh=mesh, in_specs=(whole,) * 3 + (split,) * 3, out_specs=whole, check_vma=check_vma)
    got = jax.jit(mapped)(x, ids, weights, *problem.weights())
    assert relative_error(got, problem.expected(x, ids, weights)) < 2e-6


def test_grouping_is_a_bijection_on_local_pairs(monkeypatch):
    problem = Problem(slots=7, hidden=32, width=32, seed=7)
    ids, weights = problem.routing(29, 5)
    local = (ids >= 0) & (ids < 7)
    for limit in (10**6, 0):  # by comparing, and by sorting
        monkeypatch.setattr("pallas_kernels.int4_moe.routing.COMPARE_LIMIT", limit)
        groups = group_pairs(jnp.asarray(ids), 7, 8)
        position, expert = np.asarray(groups.position), np.asarray(groups.tile_expert)
        counts = np.bincount(ids[local], minlength=7)
        assert groups.tile_count[0] == np.sum(-(-counts // 8)) <= tile_bound(ids.size, 7, 8)
        assert np.unique(position[local]).size == local.sum()
        np.testing.assert_array_equal(expert[position[local] // 8], ids[local])
        assert (position[~local] == expert.size * 8).all()
        for e in range(7):  # pairs of an expert keep their order
            assert (np.diff(position[ids == e]) == 1).all()
        x = problem.activations(29)
        grouped = np.asarray(gather_rows(jnp.asarray(x), groups, 8))
        np.testing.assert_array_equal(grouped[position[local]], np.repeat(x, 5, 0)[local.reshape(-1)])
        poisoned = np.full((expert.size * 8, 32), np.nan, np.float32)
        poisoned[position[local]] = grouped[position[local]]
        expected = (np.where(local, weights, 0)[..., None] * x[:, None]).sum(1)
        np.testing.assert_allclose(combine(jnp.asarray(poisoned), groups, jnp.asarray(weights)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": Stack(jnp.zeros((3, 64, 8), jnp.int32), jnp.ones((3, 64, 1), jnp.bfloat16))}, "groups of 32"),
        ({"implementation": "marlin"}, "give one of auto, reference"),
        ({"up": Stack(jnp.zeros((3, 64, 4), jnp.int32), 0)}, r"up.packed is int32\[3, 64, 4\], not int32\[3, 64, 8\]"),
        (
            {"down": Stack(jnp.zeros((3, 64, 8), jnp.int32), jnp.zeros((3, 64, 2), jnp.float32))},
            "down.scale is float32",
        ),
        ({"expert_ids": jnp.zeros((4, 2), jnp.int32)}, "expert_ids"),
        ({"expert_ids": jnp.zeros((5, 2), jnp.float32)}, "not an integer type"),
        ({"implementation": "hopper"}, "has no kernel: they are for"),
    ],
)
def test_refuses_what_does_not_belong_together(change, message):
    problem = Problem(slots=3, hidden=64, width=64)
    call = dict(zip(("gate", "up", "down"), problem.weights(), strict=True))
    ids, weights = problem.routing(5, 2)
    call |= {"x": jnp.asarray(problem.activations(5)), "expert_ids": jnp.asarray(ids)}
    call |= {"expert_weights": jnp.asarray(weights)} | change
    with pytest.raises(ValueError, match=message):
        int4_moe(**call)


def test_public_function_takes_the_reference_on_a_cpu():
    problem = Problem(slots=3, hidden=64, width=64)
    x = problem.activations(5)
    ids, weights = problem.routing(5, 2)
    got = int4_moe(jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), *problem.weights())
    assert got.dtype == jnp.float32
    assert relative_error(got, problem.expected(x, ids, weights)) < 2e-6


def test_grouping_many_pairs_runs_no_loop():
    """Above COMPARE_LIMIT too: a loop would run outside CUDA graphs, in every layer of a prefill."""
    compiled = jax.jit(lambda ids: group_pairs(ids, 24, 32)).lower(jnp.zeros((513, 8), jnp.int32)).compile()
    assert "while(" not in compiled.as_text()
