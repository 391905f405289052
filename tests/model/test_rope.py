"""YaRN's frequencies against published values, rotation against complex multiplication."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.model.rope import inverse_frequencies, rotate_interleaved, rotation

K26 = ModelConfig.from_json(Path(__file__).parents[1] / "data" / "configs" / "kimi_k26.json")

# Of K2.6's 32 pairs, computed by transformers' YaRN from the real configuration.
PUBLISHED = {
    0: 1.0, 8: 6.6874e-2, 9: 4.3777e-2, 14: 4.4658e-3, 19: 1.5837e-4, 20: 1.8070e-5, 31: 4.3822e-7,
}  # fmt: skip


def test_k26_frequencies():
    frequencies = inverse_frequencies(64, K26.rope_theta, K26.yarn)
    for pair, value in PUBLISHED.items():
        assert frequencies[pair] == pytest.approx(value, rel=5e-5), pair


def test_without_yarn():
    np.testing.assert_allclose(inverse_frequencies(8, 10_000.0, None), [1, 0.1, 0.01, 0.001])


def test_rotation_is_multiplication_by_a_phase():
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 1000], [7, 8, 9, 10, 262_143]])
    frequencies = inverse_frequencies(8, 50_000.0, None)
    cos, sin = rotation(jnp.asarray(positions), frequencies)
    phase = np.exp(1j * positions[..., None] * frequencies)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * phase
    expected = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    # Angles are float32: near position 262,143 their rounding is 2^-24 · 262,143 = 0.016.
    result = np.asarray(rotate_interleaved(jnp.asarray(x), cos, sin))
    np.testing.assert_allclose(result[:, :4], expected[:, :4], atol=1e-5)
    np.testing.assert_allclose(result, expected, atol=0.1)


def test_position_zero_changes_nothing():
    x = jnp.arange(8.0)[None]
    cos, sin = rotation(jnp.zeros(1, jnp.int32), inverse_frequencies(8, 1e4, K26.yarn))
    np.testing.assert_array_equal(rotate_interleaved(x, cos, sin), x)
