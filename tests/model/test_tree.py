"""Rows of a tree on a cached prefix: each sees what a causal forward of its own path would."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model.pages import Latents
from kimi_jax.model.rows import Rows, causal_rows

pytestmark = pytest.mark.core

# Row 0 is the root; rows 1.. name their parents. The last row is padding.
TREES = {"chain": [-1, 0, 1, 2, 3], "star": [-1, 0, 0, 0, 0], "mixed": [-1, 0, 0, 1, 3, 2, 1], "root": [-1]}


def ancestors_of(parents):
    seen = np.zeros((len(parents) + 1, len(parents) + 1), bool)
    for row, parent in enumerate(parents):
        seen[row, row] = True
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen


@pytest.mark.parametrize("shape", TREES)
def test_every_row_is_a_causal_forward_of_its_path(shape, engines, forward):
    parents, engine = TREES[shape], engines()
    rng = np.random.default_rng(3)
    prefixes = [rng.integers(0, 320, 9), rng.integers(0, 320, 4)]
    count, rows, capacity = len(prefixes), len(parents) + 1, 16
    tokens = rng.integers(0, 320, (count, rows))
    seen = ancestors_of(parents)
    depths = np.maximum(seen.sum(1) - 1, 0)

    padded = np.zeros((count, capacity), np.int32)
    for i, prefix in enumerate(prefixes):
        padded[i, : len(prefix)] = prefix
    lengths = np.array([len(prefix) for prefix in prefixes], np.int32)
    # What lies behind a request's length is garbage, as after an earlier round's rejected rows.
    own = forward(engine, causal_rows(jnp.asarray(padded), jnp.zeros(count, jnp.int32), jnp.asarray(lengths))).output
    garbage = np.arange(capacity) >= lengths[:, None]
    cache = [
        Latents(np.where(garbage[..., None], np.nan, layer.latent), np.where(garbage[..., None], np.nan, layer.rope))
        for layer in own.latents
    ]
    tree = Rows(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths[:, None] + depths, jnp.int32),
        jnp.broadcast_to(jnp.asarray(seen), (count, rows, rows)),
        jnp.asarray(lengths),
        jnp.zeros((count, 0), jnp.int32),
    )
    verified = forward(engine, tree, cache)
    assert np.isfinite(verified.logits).all(), "padding rows and garbage must not make NaN"
    for i, prefix in enumerate(prefixes):
        for row in range(len(parents)):
            path = np.flatnonzero(seen[row])
            text = np.concatenate([prefix, tokens[i, path]])[None].astype(np.int32)
            counts = jnp.full(1, text.shape[1], jnp.int32)
            text = np.pad(text, [(0, 0), (0, 16 - text.shape[1])])  # one shape, one compilation
            alone = forward(engine, causal_rows(jnp.asarray(text), jnp.zeros(1, jnp.int32), counts))
            np.testing.assert_allclose(
                verified.logits[i, row], alone.logits[0, int(counts[0]) - 1], atol=1e-4, err_msg=f"row {row}"
            )


def test_an_empty_request_gives_zeros_not_nan(engines, forward):
    nothing = causal_rows(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32), jnp.asarray([3, 0], jnp.int32))
    result = forward(engines(), nothing)
    assert np.isfinite(result.logits).all()
    assert not nothing.valid[1].any()
