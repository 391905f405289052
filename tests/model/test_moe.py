"""The router to the bit, and the layer against a plain loop over tokens and experts."""

import jax.numpy as jnp
import numpy as np

from kimi_jax.model.moe import Router
from kimi_jax.parameters import bind, declarations
from kimi_jax.quantization import Int4Weight, dequantize


def test_the_correction_bias_stays_float32_to_the_bit(engines):
    """A bias difference of 2^-12 decides; in bfloat16 both would be 0.5 and the lower id would win."""
    config = engines().config
    router = Router(config)
    bias = np.zeros(config.n_routed_experts, np.float32)
    bias[:8] = 0.5
    bias[4:8] += 2.0**-12
    zero = jnp.zeros((config.n_routed_experts, config.hidden_size), jnp.bfloat16)
    bound = bind(router, {"weight": zero, "e_score_correction_bias": jnp.asarray(bias)})
    picked, weights = bound(jnp.ones((1, config.hidden_size), jnp.bfloat16))
    assert sorted(np.asarray(picked)[0].tolist()) == [4, 5, 6, 7]
    # The bias selects only: all scores are sigmoid(0), so the weights are equal and sum to the scaling factor.
    np.testing.assert_allclose(weights, config.routed_scaling_factor / 4, rtol=1e-6)


def test_the_bias_is_float32_whatever_the_models_type(engines):
    for dtype in ("float32", "bfloat16"):
        target = engines(dtype=dtype).parameters["target"]["model"]["layers"][1]["mlp"]
        assert target["gate"]["e_score_correction_bias"].dtype == jnp.float32
    declared = {d.path[-1]: d for d in declarations(engines().model.model.layers[1].mlp, jnp.bfloat16)}
    assert declared["e_score_correction_bias"].fixed


def test_a_layer_is_the_weighted_sum_of_its_experts(engines):
    engine = engines()
    block = bind(engine.model, engine.parameters["target"]).model.layers[2].mlp
    x = np.random.default_rng(0).normal(size=(5, engine.config.hidden_size)).astype(np.float32)
    valid = jnp.asarray([True, True, False, True, True])
    out = np.asarray(block(jnp.asarray(x), valid))

    def silu(v):
        return v / (1 + np.exp(-v))

    def mlp(v, gate, up, down):
        return (silu(v @ gate.T) * (v @ up.T)) @ down.T

    def int4(parameter):
        weight = parameter.get_value()
        assert isinstance(weight, Int4Weight)
        return np.asarray(dequantize(weight), np.float64)

    gate, up, down = (int4(p) for p in (block.experts.gate_proj, block.experts.up_proj, block.experts.down_proj))
    shared = block.shared_experts
    dense = [np.asarray(p.weight[...], np.float64) for p in (shared.gate_proj, shared.up_proj, shared.down_proj)]
    picked, weights = (np.asarray(part) for part in block.gate(jnp.asarray(x)))
    for row in range(5):
        expected = mlp(x[row].astype(np.float64), *dense)
        if row != 2:  # a padding row is routed nowhere
            for expert, weight in zip(picked[row], weights[row], strict=True):
                expected = expected + weight * mlp(x[row].astype(np.float64), gate[expert], up[expert], down[expert])
        np.testing.assert_allclose(out[row], expected, atol=1e-5)
