"""YaRN's frequencies against published values, rotation against complex multiplication."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.model.rope import inverse_frequencies, rotate, rotation
from kimi_jax.model.rows import causal_rows

DATA = Path(__file__).parents[1] / "data"
K26 = ModelConfig.from_json(DATA / "configs" / "kimi_k26.json")
CASES = json.loads((DATA / "config_variants.json").read_text())
TINY = json.loads((DATA / "tiny_random" / "config.json").read_text())

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


def changed(changes):
    text = {name: value for name, value in (TINY["text_config"] | changes).items() if value is not None}
    return TINY | {"text_config": text}


@pytest.mark.parametrize("name", CASES)
def test_every_field_of_a_rope_configuration_counts_as_in_transformers(name):
    case = CASES[name]
    config = ModelConfig.from_dict(changed(case["changes"]))
    frequencies = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
    np.testing.assert_allclose(frequencies, case["inv_freq"], rtol=1e-6)
    assert (config.yarn.amplitude if config.yarn else 1.0) == pytest.approx(case["amplitude"], rel=1e-7)
    assert config.attention_scale == pytest.approx(case["scale"], rel=1e-7)


@pytest.mark.parametrize("name", [name for name in CASES if "logits" in CASES[name]])
def test_logits_of_a_changed_configuration_are_those_of_transformers(name, engines, forward, tmp_path):
    case, tiny = CASES[name], DATA / "tiny_random"
    for file in tiny.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(changed(case["changes"])))
    ids = np.array([case["ids"]], np.int32)
    engine = engines(checkpoint=tmp_path, drafter=None)
    result = forward(engine, causal_rows(ids, np.zeros(1, np.int32), np.full(1, ids.shape[1], np.int32)))
    np.testing.assert_allclose(result.logits[0, :, :16], case["logits"], atol=1e-4)


def test_pairs_of_halves_are_interleaved_pairs_in_another_order():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    cos, sin = rotation(jnp.arange(3), inverse_frequencies(8, 100.0, None), 1.5)
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    halves = np.asarray(rotate(jnp.asarray(x), cos, sin, interleaved=False))
    np.testing.assert_array_equal(halves[:, order], rotate(jnp.asarray(x[:, order]), cos, sin, interleaved=True))


def test_rotation_is_multiplication_by_a_phase():
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 1000], [7, 8, 9, 10, 262_143]])
    frequencies = inverse_frequencies(8, 50_000.0, None)
    cos, sin = rotation(jnp.asarray(positions), frequencies)
    phase = np.exp(1j * positions[..., None] * frequencies)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * phase
    expected = np.stack([turned.real, turned.imag], -1).reshape(x.shape)
    # Angles are float32: near position 262,143 their rounding is 2^-24 · 262,143 = 0.016.
    result = np.asarray(rotate(jnp.asarray(x), cos, sin, interleaved=True))
    np.testing.assert_allclose(result[:, :4], expected[:, :4], atol=1e-5)
    np.testing.assert_allclose(result, expected, atol=0.1)


def test_position_zero_changes_nothing():
    x = jnp.arange(8.0)[None]
    cos, sin = rotation(jnp.zeros(1, jnp.int32), inverse_frequencies(8, 1e4, K26.yarn))
    np.testing.assert_array_equal(rotate(x, cos, sin, interleaved=True), x)
