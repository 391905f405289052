import numpy as np
import pytest


@pytest.fixture(scope="session")
def oracle(oracles):
    return oracles["tree_attention"]


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
