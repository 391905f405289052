"""Predicted against published: the claimed bands, with calibration and held-out points apart."""

from collections import Counter

import pytest

from kimi_jax.estimator.search import ERROR_BAND
from kimi_jax.estimator.study.published import ACCEPTANCE_BAND, ACCEPTANCE_POINTS, OVERLAP, POINTS


def test_points_within_the_claimed_bands(capsys):
    with capsys.disabled():
        print(f"\npredicted against published, overlap {OVERLAP:g}")
        for point in POINTS:
            numbers = f"{point.published:9.1f}{point.predicted:9.1f}{100 * point.error:+6.0f} %"
            print(f"  {point.role:12}{numbers}  {point.name}")
    for point in POINTS:
        assert abs(point.error) <= ERROR_BAND[point.family], point.name


def test_acceptance_points_within_the_claimed_band():
    for point in ACCEPTANCE_POINTS:
        assert abs(point.error) <= ACCEPTANCE_BAND, point.name


def test_claimed_bands_are_those_asked_for():
    assert ERROR_BAND == {"single-node": 0.15, "wide-ep": 0.30}


def test_calibration_and_held_out_points_are_apart():
    assert Counter((p.role, p.family) for p in POINTS) == {
        ("calibration", "single-node"): 15,
        ("held-out", "single-node"): 6,
        ("held-out", "wide-ep"): 6,
    }
    names = [p.name for p in POINTS]
    assert len(set(names)) == len(names)
    assert all(p.source for p in POINTS)


@pytest.mark.parametrize("point", [p for p in POINTS if p.family == "wide-ep"], ids=lambda p: p.name)
def test_wide_points_lie_on_one_overlap_and_their_own_hardware(point):
    e = point.estimate()
    assert e.scenario.overlap == OVERLAP == 0
    assert e.memory.fits
    assert e.scenario.kernels.name == "sglang"
