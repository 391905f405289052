import numpy as np
import pytest


def softmax_over_paths(q_latent, q_rope, cache_latent, cache_rope, lengths, row_latent, row_rope, ancestors, *, scale):
    """Each row as the last token of its own path, in float64: keys gathered, then an ordinary softmax."""
    queries = np.concatenate([np.asarray(q_latent, np.float64), np.asarray(q_rope, np.float64)], -1)
    cache = np.concatenate([np.asarray(cache_latent, np.float64), np.asarray(cache_rope, np.float64)], -1)
    own = np.concatenate([np.asarray(row_latent, np.float64), np.asarray(row_rope, np.float64)], -1)
    rank = q_latent.shape[-1]
    out = np.zeros(q_latent.shape)
    lse = np.full(q_latent.shape[:3], -np.inf)
    for b, length in enumerate(np.asarray(lengths)):
        for i, sees in enumerate(np.asarray(ancestors[b])):
            if not sees.any():
                continue
            keys = np.concatenate([cache[b, :length], own[b, sees]])
            scores = queries[b, i] @ keys.T * scale
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            out[b, i] = weights / total @ keys[:, :rank]
            lse[b, i] = (top + np.log(total))[:, 0]
    return out, lse


@pytest.fixture(scope="session")
def oracle():
    return softmax_over_paths


@pytest.fixture(scope="session")
def assert_matches():
    """Outputs within `tolerance` of the largest, log-sum-exps within `lse_tolerance`; 0 and −inf where nothing is."""

    def check(got, want, *, tolerance, lse_tolerance):
        (out, lse), (want_out, want_lse) = ((np.asarray(a, np.float64) for a in pair) for pair in (got, want))
        assert not np.isnan(out).any()
        seen = np.isfinite(want_lse)
        assert (np.isfinite(lse) == seen).all()
        assert (lse[~seen] == -np.inf).all()
        assert (out[~seen] == 0).all()
        np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=0, atol=lse_tolerance)
        np.testing.assert_allclose(out, want_out, rtol=0, atol=tolerance * max(1.0, np.abs(want_out).max()))

    return check
