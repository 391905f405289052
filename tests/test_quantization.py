"""The INT4 format against known words and against its own inverse."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.quantization import Int4Weight, dequantize, pack, quantize, unpack

pytestmark = pytest.mark.core


def test_known_words():
    words = np.array([[0x76543210], [0x88888888], [0xFEDCBA98]], np.uint32).view(np.int32)
    expected = [[-8, -7, -6, -5, -4, -3, -2, -1], [0] * 8, [0, 1, 2, 3, 4, 5, 6, 7]]
    np.testing.assert_array_equal(unpack(jnp.asarray(words)), expected)
    np.testing.assert_array_equal(pack(jnp.asarray(expected)), words)


def test_every_code_survives_packing():
    codes = np.random.default_rng(0).integers(-8, 8, (3, 5, 64))
    np.testing.assert_array_equal(unpack(pack(jnp.asarray(codes))), codes)


def test_dequantised_values_are_code_times_the_scale_of_their_group():
    codes = np.arange(64).reshape(1, 64) % 16 - 8
    scale = jnp.asarray([[0.5, 3.0]], jnp.bfloat16)
    weight = Int4Weight(pack(jnp.asarray(codes)), scale)
    assert weight.shape == (1, 64)
    assert weight.group_size == 32
    np.testing.assert_array_equal(dequantize(weight), codes * np.repeat([[0.5, 3.0]], 32, axis=1))


def test_requantising_is_lossless():
    rng = np.random.default_rng(1)
    codes = rng.integers(-7, 8, (4, 16, 128))
    codes[..., ::32] = 7  # every group reaches the largest code, as quantised weights do
    scale = jnp.asarray(rng.uniform(1e-3, 3, (4, 16, 4)), jnp.bfloat16)
    weight = Int4Weight(pack(jnp.asarray(codes)), scale)
    again = quantize(dequantize(weight))
    np.testing.assert_array_equal(again.packed, weight.packed)
    np.testing.assert_array_equal(again.scale.astype(jnp.float32), weight.scale.astype(jnp.float32))


def test_rounding_error_is_at_most_half_a_step():
    weight = np.random.default_rng(2).normal(size=(8, 96)).astype(np.float32)
    quantised = quantize(jnp.asarray(weight))
    step = np.repeat(np.asarray(quantised.scale, np.float32), 32, axis=1)
    # The scale is rounded to bfloat16 (relative 2^-8 at most), which can push a group's extreme 7 · 2^-8 further off.
    assert (np.abs(np.asarray(dequantize(quantised)) - weight) <= step * (0.5 + 7 / 256)).all()


def test_a_group_of_zeros_stays_zero():
    quantised = quantize(jnp.zeros((2, 32)))
    np.testing.assert_array_equal(dequantize(quantised), 0)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="group size 32"):
        quantize(jnp.zeros((2, 40)))
    with pytest.raises(ValueError, match="8"):
        pack(jnp.zeros((2, 12), jnp.int32))
