"""Programs that measure a card compute what they say."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import rates


def test_mma_sync_sums_ones():
    run = jax.jit(lambda: rates.mma_sync(1, 3, plgpu.InterpretGPUParams()))
    out = np.asarray(run())
    assert out.shape == (rates.CTAS_PER_CORE, 128, 64)
    assert (out == 64 * 3).all()


def test_operations_are_of_every_warp():
    # 8 warps of each of two CTAs, 32 products of 16 x 8 x 16 a trip.
    assert rates.mma_sync_operations(132, 10) == 132 * 2 * 8 * 10 * 32 * 2 * 16 * 8 * 16
    assert rates.matmul_operations_per_s(2e-3, 8192) == pytest.approx(5.5e14, rel=1e-3)
