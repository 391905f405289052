"""The ledger of the tower against XLA's own count and the published checkpoint, and the estimate of a picture."""

import json

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.ledger.models import k26_vision
from kimi_jax.ledger.vision import vision
from kimi_jax.parameters import bind, declarations, from_leaves
from kimi_jax.vision.config import VisionConfig
from kimi_jax.vision.tower import VisionModel


def test_weights_are_the_published_bytes():
    """335 tensors of 0.942 GB in the last two shards of K2.6 (docs/checkpoints.md)."""
    held = vision(k26_vision(), 256).weights
    assert held == 942_287_840
    assert sum(1 for _ in declarations(VisionModel(k26_vision()))) == 335


def test_operations_are_those_that_xla_counts():
    config = VisionConfig(
        hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_hidden_layers=2, patch_size=14,
        pos_emb_height=8, pos_emb_width=8, pos_emb_time=4, text_hidden_size=512, projector_ln_eps=1e-5,
        placeholder_id=1,
    )  # fmt: skip
    module = VisionModel(config)
    leaves = {d.path: jax.ShapeDtypeStruct(d.shape, jnp.float32) for d in declarations(module, jnp.float32)}
    given = jax.ShapeDtypeStruct((256, 588), jnp.uint8), jax.ShapeDtypeStruct((3,), jnp.int32)
    lowered = jax.jit(lambda parameters, *rest: bind(module, parameters)(*rest)).lower(
        from_leaves(module, leaves), *given
    )
    counted = lowered.cost_analysis()["flops"]
    expected = vision(config, 256, jnp.float32).total.flops
    assert expected == pytest.approx(counted, rel=0.06)  # XLA counts norms, positions and softmax too


def test_what_a_picture_costs(command):
    out = command("estimate", "image", "--mesh", "nvl72", "--sizes", "224x224", "1920x1080", "--json").out
    small, large = json.loads(out)
    assert (small["patches"], small["tokens"], large["patches"], large["tokens"]) == (256, 64, 10_764, 2691)
    assert small["tower_ms"] < 1 < 50 < large["tower_ms"]
    assert large["first_token_ms"] == large["tower_ms"] + large["prompt_ms"]
    assert small["prompt_ms"] < large["prompt_ms"]
    for wrong in ("0x5", "12", "1e3x2", "-1x4"):
        error = command("estimate", "image", f"--sizes={wrong}", expect=1).err
        assert "write each as width x height" in error
