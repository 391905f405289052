import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import prefill_attention, tree_attention
from pallas_kernels.tree_attention.prefill import workspace_bytes
from pallas_kernels.tree_attention.shapes import SCALE, Shape, ancestors_of, parents, problem

NOPE, V = 12, 10
SHAPE = Shape(3, 21, 4, 70, (70, 0, 33), kv_lora_rank=32, rope=8, page=16)


def expanded(shape, dtype=jnp.float32, trees=None):
    """A problem whose queries are per-head, with the two halves of the up-projection."""
    rng = np.random.default_rng(7)
    _, *rest = problem(shape, dtype=dtype, trees=trees)
    q_nope = jnp.asarray(rng.standard_normal((shape.requests, shape.rows, shape.heads, NOPE)), dtype)
    w_uk = jnp.asarray(rng.standard_normal((shape.heads, NOPE, shape.kv_lora_rank)) * 0.2, dtype)
    w_uv = jnp.asarray(rng.standard_normal((shape.heads, V, shape.kv_lora_rank)) * 0.2, dtype)
    return q_nope, *rest, w_uk, w_uv


def absorbed(q_nope, q_rope, *rest_and_weights, valid=None):
    *rest, w_uk, w_uv = (
        np.asarray(a, np.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in rest_and_weights
    )
    q_latent = np.einsum("brhn,hnc->brhc", np.asarray(q_nope, np.float32), w_uk)
    out, lse = tree_attention(
        jnp.asarray(q_latent), jnp.asarray(q_rope, jnp.float32), *map(jnp.asarray, rest), scale=SCALE, valid=valid
    )
    return np.einsum("brhc,hvc->brhv", out, w_uv), lse


@pytest.mark.parametrize("block", [8, 21, 64, 256])
def test_it_equals_the_absorbed_form_on_trees(block, assert_matches):
    rng = np.random.default_rng(0)
    arguments = expanded(SHAPE, trees=[parents("random", 21, rng), parents("star", 21, rng), parents("chain", 13, rng)])
    got = prefill_attention(*arguments, scale=SCALE, block=block)
    assert_matches(got, absorbed(*arguments), tolerance=1e-5, lse_tolerance=1e-5)


@pytest.mark.parametrize("counts", [None, (21, 5, 0)])
def test_a_causal_chunk_is_a_chain(counts, assert_matches):
    *rest, w_uk, w_uv = expanded(SHAPE)
    chains = [list(range(-1, count - 1)) for count in counts or (21, 21, 21)]
    want = absorbed(*rest[:-1], jnp.asarray(ancestors_of(chains, 21)), w_uk, w_uv)
    row_counts = None if counts is None else jnp.asarray(counts, jnp.int32)
    got = prefill_attention(*rest[:-1], None, w_uk, w_uv, scale=SCALE, row_counts=row_counts, block=16)
    assert_matches(got, want, tolerance=1e-5, lse_tolerance=1e-5)


def test_bfloat16_keys_and_probabilities_are_rounded_once(assert_matches):
    arguments = expanded(SHAPE, jnp.bfloat16)
    got = prefill_attention(*arguments, scale=SCALE, block=16)
    assert got[0].dtype == jnp.bfloat16
    # Keys, values, probabilities and the output are rounded to 8 bits: scores of order 3 move by about 3 x 2^-9.
    assert_matches(got, absorbed(*arguments), tolerance=0.03, lse_tolerance=0.03)


def test_it_is_differentiable_without_a_cache():
    shape = Shape(1, 21, 2, 0, (0,), kv_lora_rank=16, rope=4)
    *rest, w_uk, w_uv = expanded(shape)

    def loss(w_uk, block):
        return (prefill_attention(*rest, w_uk, w_uv, scale=SCALE, block=block)[0] ** 2).sum()

    whole = jax.grad(loss)(w_uk, 256)
    assert np.abs(whole).max() > 1e-3
    np.testing.assert_allclose(jax.grad(loss)(w_uk, 8), whole, rtol=1e-4, atol=1e-6)


def test_it_never_holds_rows_times_context():
    shape = Shape(1, 64, 4, 4096, (4096,), kv_lora_rank=32, rope=8)
    arguments = expanded(shape)
    f = jax.jit(lambda *a: prefill_attention(*a, scale=SCALE, block=64))
    temporary = f.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    sizes = {"requests": 1, "rows": 64, "heads": 4, "nope": NOPE, "v": V, "itemsize": 4}
    # The CPU compiler keeps a few layouts of a block; all of it stays far from 64 x 4 x 4096 scores (4.2 MB).
    assert temporary < 4 * workspace_bytes(**sizes, block=64) < 64 * 4 * 4096 * 4


def test_a_part_where_a_request_sees_nothing_gives_zero_and_minus_infinity(assert_matches):
    """A part of a split context without the rows' own keys: whole blocks, or all of them, lie past the lengths."""
    shape = Shape(3, 21, 4, 4 * 64, (65, 0, 256), kv_lora_rank=32, rope=8)
    *rest, ancestors, w_uk, w_uv = expanded(shape)
    valid = ancestors.any(-1).at[2].set(False)  # of the last request every row is padding
    arguments = (*rest, ancestors & False, w_uk, w_uv)
    got = prefill_attention(*arguments, scale=SCALE, valid=valid, block=64)
    want = absorbed(*arguments, valid=valid)
    assert np.isfinite(want[1]).all(axis=(1, 2)).tolist() == [True, False, False]
    assert_matches(got, want, tolerance=1e-5, lse_tolerance=1e-5)


def test_the_number_of_steps_follows_from_the_shapes():
    """A GPU's host drives a loop whose trips only the device knows."""
    loops = re.findall(
        r" (while|scan|cond)\b",
        str(jax.make_jaxpr(functools.partial(prefill_attention, scale=SCALE, block=16))(*expanded(SHAPE))),
    )
    assert loops == ["scan"] * 2  # over the rows and over the cache


def test_counts_with_a_mask_are_refused():
    with pytest.raises(ValueError, match="row_counts belongs to a causal chunk"):
        prefill_attention(*expanded(SHAPE), scale=SCALE, row_counts=jnp.asarray([1, 2, 3]))


@pytest.mark.slow
def test_128k_tokens_of_context_take_no_more_temporaries_than_8k():
    """The model's prefill program, two layers at full size, compiled for an absent rack; one request a group."""
    script = Path(__file__).parents[3] / "scripts" / "profile.py"
    options = {"mesh": "nvl72", "gpu": "gb300", "program": "prefill", "layers": 2, "batch": 9, "budget": 0}
    memory = []
    for context in (8192, 131072):
        arguments = [f"--{name}={value}" for name, value in (options | {"context": context}).items()]
        command = [sys.executable, str(script), *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        memory.append(json.loads(done.stdout)["memory"])
    small, large = memory
    # The cache itself is what grows: 1,152 bytes a token and layer, with room for one more token, in multiples of 64.
    assert large["cache"] - small["cache"] == 2 * 1152 * (131072 - 8192)
    assert large["temporaries"] <= small["temporaries"] < 1.5e9
