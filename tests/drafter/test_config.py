"""Drafter configurations: the public Kimi drafter's values, and every refusal naming its field."""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import pytest

from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.parameters import declarations

TARGET = ModelConfig.from_json(Path(__file__).parents[1] / "data" / "configs" / "kimi_k26.json")
KIMI = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 7168, "head_dim": 128,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 6, "intermediate_size": 18432,
    "rms_norm_eps": 1e-5, "num_target_layers": 61, "block_size": 8, "vocab_size": 163840, "hidden_act": "silu",
    "max_position_embeddings": 262144, "rope_theta": 50000.0, "attention_bias": False,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838},
}  # fmt: skip
"""The public Kimi-K2.6-DFlash configuration."""


def without(name: str) -> dict:
    return {key: value for key, value in KIMI.items() if key != name}


def scaling(**changes) -> dict:
    return KIMI | {"rope_scaling": {k: v for k, v in (KIMI["rope_scaling"] | changes).items() if v is not None}}


def test_kimi_drafter():
    config = DrafterConfig.from_dict(KIMI)
    config.check(TARGET)
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert (config.block_size, config.mask_token_id, config.draft_window) == (8, 163838, 4096)
    assert config.layer_types == ("full_attention",) * 6
    assert not any(config.causal(layer) for layer in range(6))
    assert [config.window(layer) for layer in range(6)] == [None] * 6
    assert config.attention_factor == 1.0
    assert config.yarn is not None
    assert config.yarn.original_max_position_embeddings == 4096


def test_kimi_drafter_has_the_published_size():
    """3.479 B parameters, 6.48 GiB in bfloat16: the size of the public file."""
    module = DFlash(DrafterConfig.from_dict(KIMI))
    parameters = sum(math.prod(d.shape) for d in declarations(module, jnp.bfloat16))
    assert round(parameters / 1e9, 3) == 3.479
    assert round(2 * parameters / 2**30, 2) == 6.48


def test_default_taps_are_the_references():
    """Evenly spaced: the public Kimi and Qwen3-8B drafters name what the rule gives."""
    taps = {"dflash_config": {"mask_token_id": 1}}
    assert DrafterConfig.from_dict(KIMI | taps).target_layer_ids == (1, 12, 24, 35, 47, 58)
    qwen = {"num_target_layers": 36, "num_hidden_layers": 5}
    assert DrafterConfig.from_dict(KIMI | taps | qwen).target_layer_ids == (1, 9, 17, 25, 33)
    assert DrafterConfig.from_dict(KIMI | taps | {"num_hidden_layers": 1}).target_layer_ids == (30,)


@pytest.mark.parametrize(
    ("raw", "factor"),
    [
        (KIMI, 1.0),
        (scaling(mscale=None, mscale_all_dim=None), 1.4158883),  # 0.1 ln 64 + 1
        (scaling(mscale_all_dim=None), 1.4158883),
        (scaling(mscale=2.0), (0.2 * math.log(64) + 1) / (0.1 * math.log(64) + 1)),
        (scaling(attention_factor=1.3), 1.3),
        (without("rope_scaling"), 1.0),
    ],
)
def test_attention_factor(raw, factor):
    """As transformers 5.15 computes it, unless overridden."""
    assert DrafterConfig.from_dict(raw).attention_factor == pytest.approx(factor, abs=1e-7)
    assert DrafterConfig.from_dict(raw, attention_factor=1.5).attention_factor == 1.5


def test_rope_fields_count_as_in_transformers():
    """An inner rope_theta before the outer one; truncate and an explicit factor are kept."""
    inner = {**KIMI["rope_scaling"], "rope_theta": 777.0, "truncate": False, "attention_factor": 1.3}
    config = DrafterConfig.from_dict(without("rope_scaling") | {"rope_parameters": inner})
    assert config.yarn is not None
    assert (config.rope_theta, config.yarn.truncate, config.attention_factor) == (777.0, False, 1.3)


def test_dflash_config_counts_before_the_top_level():
    raw = KIMI | {"mask_token_id": 5}
    assert DrafterConfig.from_dict(raw).mask_token_id == 163838
    flat = without("dflash_config") | KIMI["dflash_config"]
    assert DrafterConfig.from_dict(flat) == DrafterConfig.from_dict(KIMI)


def test_sliding_layers_are_causal():
    raw = KIMI | {"layer_types": ["full_attention"] * 5 + ["sliding_attention"], "sliding_window": 2048}
    config = DrafterConfig.from_dict(raw)
    assert [config.causal(layer) for layer in range(6)] == [False] * 5 + [True]
    assert config.window(5) == 2048
    assert not DrafterConfig.from_dict(raw | {"is_causal": False}).causal(5)


def test_k27_drafter_keeps_its_window_of_2048():
    """The window of all layers is also what is kept of the context, whatever a longer one was asked for."""
    folder = Path(__file__).parents[1] / "data" / "configs"
    config = DrafterConfig.from_json(folder / "kimi_k27_drafter.json")
    config.check(ModelConfig.from_json(folder / "kimi_k27_code.json"))
    assert [config.window(layer) for layer in range(6)] == [2048] * 6
    assert not any(config.causal(layer) for layer in range(6))
    assert config.draft_window == 2048
    assert DrafterConfig.from_json(folder / "kimi_k27_drafter.json", draft_window=512).draft_window == 512
    mixed = KIMI | {"layer_types": ["full_attention"] * 5 + ["sliding_attention"], "sliding_window": 2048}
    assert DrafterConfig.from_dict(mixed).draft_window == 4096


def dflash(**changes) -> dict:
    return KIMI | {"dflash_config": KIMI["dflash_config"] | changes}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (without("hidden_size"), "hidden_size is missing"),
        (without("num_target_layers"), "num_target_layers is missing"),
        (without("rope_theta"), "rope_theta is missing"),
        (dflash(mask_token_id=None), "mask_token_id is missing"),
        (dflash(mask_token_id=163840), "mask_token_id is 163840; expected an integer from 0 to 163,839"),
        (dflash(target_layer_ids=[1, 61]), r"target_layer_ids \[61\] are not 0-based"),
        (dflash(target_layer_ids=[1, 1]), "target_layer_ids is"),
        (dflash(target_layer_ids="1,2"), "target_layer_ids is"),
        (dflash(projector_type="domino"), "projector_type is 'domino'"),
        (dflash(shift_label=True), "shift_label is True"),
        (KIMI | {"dflash_config": 3}, "dflash_config is 3"),
        (KIMI | {"block_size": 1}, "block_size is 1"),
        (KIMI | {"hidden_size": "7168"}, "hidden_size is '7168'"),
        (KIMI | {"num_attention_heads": True}, "num_attention_heads is True"),
        (KIMI | {"num_key_value_heads": 7}, "num_key_value_heads 7 does not divide"),
        (KIMI | {"head_dim": 127}, "head_dim is 127"),
        (KIMI | {"dflash_config": [1]}, r"dflash_config is \[1\]; expected a JSON object"),
        ([KIMI], r"the file is .*; expected a JSON object"),
        (KIMI | {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        (KIMI | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (KIMI | {"attention_bias": True}, "attention_bias is True"),
        (KIMI | {"layer_types": ["full_attention"]}, "layer_types is"),
        (KIMI | {"layer_types": ["sliding_attention"] * 6}, "sliding_window is missing"),
        (scaling(type="linear"), "rope_scaling type 'linear'"),
        (scaling(original_max_position_embeddings=None), "original_max_position_embeddings is missing"),
        (scaling(truncate="no"), "rope_scaling.truncate is 'no'; expected true or false"),
        (scaling(factor=0), "rope_scaling.factor is 0; expected a number from 1 to"),
        (scaling(mrope_section=[1]), "rope_scaling.mrope_section is no field of the rope type 'yarn'"),
        (KIMI | {"rope_theta": 1}, "rope_theta is 1; expected a number from 2 to"),
        (KIMI | {"rms_norm_eps": 0}, "rms_norm_eps is 0; expected a number from"),
        (KIMI | {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window is True"),
        (KIMI | {"output_multiplier": 0}, "output_multiplier is 0; expected a number from"),
        (KIMI | {"conv_kernel_size": 2}, "conv_group_size is missing"),
        (KIMI | {"conv_kernel_size": 2, "conv_group_size": 15, "selector_rank": 4, "selector_top_k": 4},
         "conv_group_size 15 does not divide"),
    ],
)  # fmt: skip
def test_refusals(raw, message):
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_dict(raw)


@pytest.mark.parametrize(("field", "value"), [("num_target_layers", 60), ("hidden_size", 4096), ("vocab_size", 163841)])
def test_a_drafter_for_another_target_is_refused(field, value):
    config = dataclasses.replace(DrafterConfig.from_dict(KIMI), **{field: value})
    with pytest.raises(ConfigError, match=f"does not fit the target: {field} is {value}"):
        config.check(TARGET)


def test_taps_and_mask_outside_the_target_are_refused():
    config = dataclasses.replace(DrafterConfig.from_dict(KIMI), target_layer_ids=(1, 61), mask_token_id=163840)
    with pytest.raises(ConfigError, match=r"target_layer_ids \[61\] do not exist.*mask_token_id 163840"):
        config.check(TARGET)


def test_file_errors_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        DrafterConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: not valid JSON"):
        DrafterConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(without("block_size") | {"vocab_size": 0}))
    with pytest.raises(ConfigError, match=r"config.json: vocab_size is 0"):
        DrafterConfig.from_json(tmp_path)
