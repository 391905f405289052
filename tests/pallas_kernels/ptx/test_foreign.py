"""Kernels that are not ours: Pallas's own matmul examples for Hopper and Blackwell, executed by the emulator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu, hopper_matmul_mgpu

from ptx.emulate import emulated
from ptx.machine import Order


def operands(m, n, k):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((m, k), (k, n))]


def close(got, a, b):
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    # One rounding to bfloat16 of each element, after float32 sums.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [None, hopper_matmul_mgpu.MatmulDimension.M, hopper_matmul_mgpu.MatmulDimension.N])
@pytest.mark.parametrize("order", [Order(), Order(seed=1)], ids=["late", "seed 1"])
def test_hopper_matmul(monkeypatch, cluster, order):
    monkeypatch.setattr(hopper_matmul_mgpu, "get_num_sms", lambda: 4)
    config = hopper_matmul_mgpu.TuningConfig(64, 64, 64, 2, cluster_dimension=cluster)
    a, b = operands(256, 512, 512)
    with emulated("h200", order=order) as emulation:
        close(jax.jit(lambda a, b: hopper_matmul_mgpu.matmul(a, b, None, config))(a, b), a, b)
    assert len(emulation.calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("order", [Order(), Order(seed=1)], ids=["late", "seed 1"])
def test_blackwell_matmul(collective, order):
    config = blackwell_matmul_mgpu.TuningConfig(128, 128, 64, 2, collective)
    a, b = operands(512, 512, 512)
    with emulated("gb300", order=order) as emulation:
        close(jax.jit(lambda a, b: blackwell_matmul_mgpu.matmul_kernel(a, b, config))(a, b), a, b)
    assert len(emulation.calls) == 1
