import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.tree_attention import merge, reference, tree_attention
from pallas_kernels.tree_attention.shapes import SCALE, Shape, parents, problem

EDGES = Shape(7, 9, 4, 100, (0, 1, 15, 16, 17, 99, 100), kv_lora_rank=32, rope=8, page=16)
RNG = np.random.default_rng(0)
TREES = [
    parents("chain", 9, RNG),
    parents("star", 9, RNG),
    [-1],
    parents("random", 5, RNG),
    [],
    parents("random", 9, RNG),
    parents("chain", 3, RNG),
]


# float32 against float64: sums of up to 109 terms of order 1.
@pytest.mark.parametrize("block", [16, 33, 100, 512])
def test_rows_equal_a_causal_forward_of_their_own_path(block, oracle, assert_matches):
    arguments = problem(EDGES, dtype=jnp.float32, trees=TREES)
    got = reference.tree_attention(*arguments, scale=SCALE, block=block)
    assert_matches(got, oracle(*arguments, scale=SCALE), tolerance=5e-6, lse_tolerance=5e-6)


def test_bfloat16_rounds_only_the_output(oracle, assert_matches):
    arguments = problem(EDGES, trees=TREES)
    out, lse = tree_attention(*arguments, scale=SCALE)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    # bfloat16 keeps 8 bits: rounding moves a value by at most 2^-8 of it.
    assert_matches((out, lse), oracle(*arguments, scale=SCALE), tolerance=2**-8, lse_tolerance=1e-5)


def test_scores_of_hundreds_do_not_overflow(oracle, assert_matches):
    arguments = problem(EDGES, dtype=jnp.float32, trees=TREES, query_std=200.0)
    want = oracle(*arguments, scale=SCALE)
    assert np.abs(want[1][np.isfinite(want[1])]).max() > 300
    got = reference.tree_attention(*arguments, scale=SCALE, block=16)
    assert_matches(got, want, tolerance=1e-4, lse_tolerance=1e-3)


def test_what_lies_past_the_length_does_not_matter():
    arguments = list(problem(EDGES, dtype=jnp.float32, trees=TREES))
    want = reference.tree_attention(*arguments, scale=SCALE, block=16)
    lengths, pages = np.asarray(arguments[5]), np.asarray(arguments[4])
    position = np.arange(EDGES.tiles * EDGES.page).reshape(EDGES.tiles, EDGES.page)
    for i in (2, 3):
        pool = np.array(arguments[i])
        for request, length in enumerate(lengths):
            reached = -(-length // EDGES.page)
            pool[pages[request, :reached]] = np.where(
                (position < length)[:reached, :, None], pool[pages[request, :reached]], np.nan
            )
        arguments[i] = jnp.asarray(pool)
    got = reference.tree_attention(*arguments, scale=SCALE, block=16)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_empty_cache_is_a_forward_of_the_rows_alone_and_differentiable(oracle, assert_matches):
    shape = Shape(2, 6, 3, 0, (0, 0), kv_lora_rank=16, rope=4)
    arguments = problem(shape, dtype=jnp.float32)
    assert_matches(
        tree_attention(*arguments, scale=SCALE), oracle(*arguments, scale=SCALE), tolerance=5e-6, lse_tolerance=5e-6
    )

    def loss(q_latent):
        out, lse = tree_attention(q_latent, *arguments[1:], scale=SCALE)
        return (out**2).sum() + lse.sum()

    direction = jnp.asarray(np.random.default_rng(1).standard_normal(arguments[0].shape), jnp.float32)
    slope = (jax.grad(loss)(arguments[0]) * direction).sum()
    step = 1e-2
    numeric = (loss(arguments[0] + step * direction) - loss(arguments[0] - step * direction)) / (2 * step)
    np.testing.assert_allclose(slope, numeric, rtol=2e-3)  # a central difference in float32


def test_parts_of_a_context_merge_into_the_whole(oracle, assert_matches):
    shape = Shape(3, 5, 2, 90, (90, 40, 0), kv_lora_rank=16, rope=4, page=16)
    arguments = problem(shape, dtype=jnp.float32, trees=[parents("random", 5, RNG), [-1, 0], []])
    *queries, latent, rope, pages, lengths, own_latent, own_rope, ancestors = arguments
    parts = [
        tree_attention(
            *queries,
            latent,
            rope,
            pages[:, first : first + 2],
            jnp.clip(lengths - 16 * first, 0, 32),
            own_latent,
            own_rope,
            ancestors & (first == 0),  # one part holds the rows' own keys
            valid=ancestors.any(-1),
            scale=SCALE,
        )
        for first in (0, 2, 4)
    ]
    outs, lses = zip(*parts, strict=True)
    assert_matches(merge(outs, lses), oracle(*arguments, scale=SCALE), tolerance=5e-6, lse_tolerance=5e-6)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_it_runs_under_shard_map(axis_type, oracle, assert_matches):
    mesh = jax.make_mesh((1, 1), ("dp", "tp"), axis_types=(getattr(jax.sharding.AxisType, axis_type),) * 2)
    shape = Shape(2, 3, 4, 1100, (1030, 7), kv_lora_rank=16, rope=4)
    arguments = problem(shape, dtype=jnp.float32)
    specs = (P("dp", None, "tp"),) * 2 + (P("dp"),) * 7
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(arguments, specs, strict=True)]

        def call(*local):
            return tree_attention(*local, scale=SCALE)

        mapped = jax.jit(jax.shard_map(call, in_specs=specs, out_specs=(P("dp", None, "tp"),) * 2))
        assert_matches(mapped(*placed), oracle(*arguments, scale=SCALE), tolerance=5e-6, lse_tolerance=5e-6)


@pytest.mark.parametrize(
    ("index", "replacement", "message"),
    [
        (1, np.zeros((7, 9, 3, 8), np.float32), "q_rope has shape"),
        (3, np.zeros((57, 16, 8), np.float32), "rope has shape"),
        (2, np.zeros((0, 16, 32), np.float32), "there is no page"),
        (4, np.zeros((8, 7), np.int32), "pages has shape"),
        (4, np.zeros((7, 7), np.float32), "pages must be integers"),
        (5, np.zeros((8,), np.int32), "lengths has shape"),
        (8, np.zeros((7, 9, 9), np.int32), "ancestors must be boolean"),
        (0, np.zeros((9, 4, 32), np.float32), "q_latent must be"),
    ],
)
def test_wrong_arguments_are_named(index, replacement, message):
    arguments = list(problem(EDGES, dtype=jnp.float32))
    arguments[index] = replacement
    with pytest.raises(ValueError, match=message):
        tree_attention(*arguments, scale=SCALE)
