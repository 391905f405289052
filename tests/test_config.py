"""Configurations of the family are read, and what the model does not implement is refused by name."""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import pytest

from kimi_jax.config import ConfigError, ModelConfig

CONFIGS = Path(__file__).parent / "data" / "configs"
REAL = json.loads((CONFIGS / "kimi_k26.json").read_text())


def test_k26_values():
    config = ModelConfig.from_json(CONFIGS / "kimi_k26.json")
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (61, 7168, 64)
    assert (config.q_lora_rank, config.kv_lora_rank) == (1536, 512)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (384, 8, 1)
    assert (config.num_moe_layers, config.vocab_size, config.quantization_group_size) == (60, 163840, 32)
    assert (config.rms_norm_eps, config.latent_norm_eps, config.routed_scaling_factor) == (1e-5, 1e-6, 2.827)
    assert config.key_prefix == "language_model."
    assert config.eos_token_ids == (163586,)
    # Published values of the reference: 192^-0.5 · (0.1 ln 64 + 1)², and no second factor on cos and sin.
    assert config.attention_scale == pytest.approx(0.14467962580268923, abs=1e-15)
    assert config.yarn is not None
    assert config.yarn.amplitude == 1.0
    assert config.yarn.softmax_factor == pytest.approx(2.0047397, abs=1e-7)


@pytest.mark.parametrize(
    ("name", "prefix", "eos"),
    [
        ("kimi_k25.json", "language_model.", 163585),
        ("kimi_k27_code.json", "language_model.", 163586),
        ("kimi_k2_thinking.json", "", 163586),
        ("deepseek_v3.json", "", None),
    ],
)
def test_other_variants(name, prefix, eos):
    config = ModelConfig.from_json(CONFIGS / name)
    assert config.key_prefix == prefix
    assert eos is None or eos in config.eos_token_ids
    if name.startswith("kimi"):  # the family has one architecture
        k26 = ModelConfig.from_dict(REAL)
        yarn = k26.yarn and dataclasses.replace(k26.yarn, beta_fast=config.yarn.beta_fast)
        same = {"key_prefix": prefix, "eos_token_ids": config.eos_token_ids, "yarn": yarn}
        assert config == dataclasses.replace(k26, **same)
        assert config.yarn.beta_fast == (1.0 if "thinking" in name else 32.0)


def test_no_rope_scaling_means_the_plain_scale():
    raw = copy.deepcopy(REAL)
    raw["text_config"]["rope_scaling"] = None
    config = ModelConfig.from_dict(raw)
    assert config.yarn is None
    assert config.attention_scale == pytest.approx(1 / math.sqrt(192))


def test_both_spellings_of_the_rope_type():
    raw = copy.deepcopy(REAL)
    raw["text_config"]["rope_scaling"]["rope_type"] = raw["text_config"]["rope_scaling"].pop("type")
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(REAL)


def test_generation_defaults_inside_text_config_are_ignored():
    raw = copy.deepcopy(REAL)
    raw["text_config"] |= {"max_length": 3, "top_k": 1, "temperature": 9.0, "eos_token_id": 163586}
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(REAL)


REQUIRED = [
    "hidden_size", "num_hidden_layers", "q_lora_rank", "kv_lora_rank", "rms_norm_eps", "rope_theta", "vocab_size",
    "moe_intermediate_size", "n_routed_experts", "routed_scaling_factor", "n_group", "scoring_func", "model_type",
    "quantization_config", "first_k_dense_replace",
]  # fmt: skip


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field):
    raw = copy.deepcopy(REAL)
    del raw["text_config"][field]
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("field", ["factor", "original_max_position_embeddings"])
def test_a_missing_yarn_field_is_named(field):
    raw = copy.deepcopy(REAL)
    del raw["text_config"]["rope_scaling"][field]
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_group": 8}, "n_group"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"model_type": "llama"}, "llama"),
        ({"hidden_size": "7168"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 7168 + 16}, "group_size"),
        ({"num_experts_per_tok": 400}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"rope_interleave": None}, "text_config.rope_interleave is None; expected true or false"),
        ({"partial_rotary_factor": 0.5}, "text_config.partial_rotary_factor is 0.5; only 1 is supported"),
        ({"head_dim": 112}, "text_config.head_dim is 112; only 64 is supported"),
        ({"num_key_value_heads": 8}, "text_config.num_key_value_heads is 8; only 64"),
        ({"num_local_experts": 8}, "text_config.num_local_experts is 8; only 384"),
        ({"sliding_window": 4096}, "text_config.sliding_window is 4096; it is not supported"),
        ({"attention_chunk_size": 64}, "attention_chunk_size"),
        ({"layer_types": ["sliding_attention"] * 61}, "layer_types"),
        ({"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config"),
        ({"attention_bias": True}, "attention_bias is True; only false is supported"),
        ({"attention_dropout": 2}, "attention_dropout"),
        ({"num_mtp_layers": 1}, "num_mtp_layers"),
        ({"topk_group": 2}, "topk_group"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"original_max_position_embeddings": 8192}, "original_max_position_embeddings is 8192; only 4096"),
        (
            {"quantization_config": {**REAL["text_config"]["quantization_config"], "kv_cache_scheme": {"num_bits": 8}}},
            "text_config.quantization_config.kv_cache_scheme is .* it is not supported",
        ),
        (
            {"quantization_config": {**REAL["text_config"]["quantization_config"], "format": "nvfp4-pack-quantized"}},
            "format is 'nvfp4-pack-quantized'; only \"pack-quantized\"",
        ),
        (
            {"quantization_config": {**REAL["text_config"]["quantization_config"], "transform_config": {"a": 1}}},
            "transform_config",
        ),
        (
            {"quantization_config": {**REAL["text_config"]["quantization_config"], "lm_head": True}},
            "quantization_config.lm_head is no field of compressed-tensors",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, named):
    raw = copy.deepcopy(REAL)
    raw["text_config"] |= change
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_theta": 10000.0, "type": "linear"}, "rope_scaling type 'linear'"),
        ({"rope_type": "longrope"}, "longrope"),
        ({"rope_type": "dynamic"}, "dynamic"),
        ({"rope_type": ["yarn"]}, "type"),
        ({"long_factor": [1.0]}, "rope_scaling.long_factor is no field of the rope type 'yarn'"),
        ({"beta_fats": 1.0}, "rope_scaling.beta_fats is no field of the rope type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor is 0.5"),
        ({"truncate": None}, "rope_scaling.truncate is None; expected true or false"),
        ({"type": "default"}, "rope_scaling.beta_fast is no field of the rope type 'default'"),
    ],
)
def test_rope_fields_that_are_not_implemented_are_refused_by_name(change, named):
    raw = copy.deepcopy(REAL)
    raw["text_config"]["rope_scaling"] |= change
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dict(raw)


ROPE = ("text_config", "rope_scaling")
WEIGHTS = ("text_config", "quantization_config", "config_groups", "group_0", "weights")
BAD_NUMBERS = {
    **{("text_config", name): (0, -1, 2.5, 10**30, "8") for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size",
        "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "max_position_embeddings",
    )},
    ("text_config", "first_k_dense_replace"): (-1, 61, 62, 99, 1.0),
    ("text_config", "num_experts_per_tok"): (385,),
    ("text_config", "rope_theta"): (0, 1, 0.5, -50000.0, 1e300, 1e-300),
    ("text_config", "rms_norm_eps"): (0, -1e-5, 1e-60, 2.0, 1e300),
    ("text_config", "routed_scaling_factor"): (0, -1, 1e-60, 1e300),
    ("text_config", "eos_token_id"): (-1, 163840, [163586, 163840], 1.5, 10**30),
    ("text_config", "bos_token_id"): (-1, 163840),
    ("text_config", "pad_token_id"): (-1, 163840),
    ("eos_token_id",): (-1, 163840),
    (*ROPE, "factor"): (0, -1, 0.5, 1e300, 1e-60),
    (*ROPE, "beta_fast"): (0, -1, 1e300),
    (*ROPE, "beta_slow"): (0, -1, 33.0, 1e-60),
    (*ROPE, "mscale"): (-1, 1e300),
    (*ROPE, "mscale_all_dim"): (-1, 1e300),
    (*ROPE, "attention_factor"): (0, -1, 1e300),
    (*ROPE, "original_max_position_embeddings"): (0, -1, 4096.5, 10**30),
    (*WEIGHTS, "group_size"): (0, -1, 4, 12, 31, 64.0, 10**30),
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"), [(p, v) for p, values in BAD_NUMBERS.items() for v in (*values, float("nan"), float("inf"))],
    ids=str,
)  # fmt: skip
def test_a_number_out_of_range_is_refused_by_file_and_field(path, value, tmp_path):
    raw = copy.deepcopy(REAL)
    functools.reduce(lambda found, name: found[name], path[:-1], raw)[path[-1]] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "config.json")) + f".*{path[-1]}"):
        ModelConfig.from_json(tmp_path)


def test_rope_interleave_is_read():
    raw = copy.deepcopy(REAL)
    raw["text_config"]["rope_interleave"] = False
    assert not ModelConfig.from_dict(raw).rope_interleave
    assert ModelConfig.from_dict(REAL).rope_interleave


def test_quantisation_at_two_places_must_agree():
    raw = copy.deepcopy(REAL)
    raw["quantization_config"] = copy.deepcopy(raw["text_config"]["quantization_config"])
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(REAL)
    raw["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    with pytest.raises(ConfigError, match=r"quantization_config and text_config.quantization_config differ"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("where", ["input_activations", "output_activations"])
def test_quantised_activations_are_refused_by_name(where):
    raw = copy.deepcopy(REAL)
    raw["text_config"]["quantization_config"]["config_groups"]["group_0"][where] = {"num_bits": 8, "type": "int"}
    with pytest.raises(ConfigError, match=f"group_0.{where} is .* it is not supported"):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dynamic", True),
        ("block_structure", [128, 128]),
        ("scale_dtype", "torch.float8_e4m3fn"),
        ("num_bits", 8),
        ("type", "float"),
        ("symmetric", False),
        ("strategy", "channel"),
        ("actorder", "group"),
    ],
)
def test_unsupported_quantisation_is_refused_by_name(field, value):
    raw = copy.deepcopy(REAL)
    raw["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"][field] = value
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_dict(raw)


WRONG = (None, "x", [], ["x"], {}, {"a": 1}, {"a": {}}, True, -1, 3.5, float("nan"), float("inf"), 10**30)


def fields(value, path=()):
    """Paths of all fields of a configuration, at any depth."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, name)
        yield from fields(inner, (*path, name))


@pytest.mark.parametrize("path", list(fields(REAL)), ids=".".join)
def test_whatever_stands_in_a_field_is_read_or_refused(path):
    """A damaged or foreign file is a ConfigError, never a TypeError from within."""
    for value in WRONG:
        raw = copy.deepcopy(REAL)
        holder = functools.reduce(lambda found, name: found[name], path[:-1], raw)
        holder[path[-1]] = value
        with contextlib.suppress(ConfigError):
            ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("text_config",), "x", "text_config is 'x'; expected a JSON object"),
        (("text_config", "rope_scaling"), [1], r"rope_scaling is \[1\]; expected a JSON object"),
        (("text_config", "quantization_config"), 4, "quantization_config is 4; expected a JSON object"),
        (("text_config", "quantization_config", "config_groups"), ["x"], "config_groups is .*; expected a JSON object"),
        (("text_config", "quantization_config", "config_groups", "group_0"), None, "group_0 is None; expected a JSON"),
        (
            ("text_config", "eos_token_id"),
            "[EOS]",
            r"eos_token_id is '\[EOS\]'; expected a token id of 0 to 163,839 or a list",
        ),
        (("text_config", "rms_norm_eps"), float("nan"), "rms_norm_eps is nan; expected a number from 1e-30 to 1"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_what_is_expected(path, value, message):
    raw = copy.deepcopy(REAL)
    functools.reduce(lambda found, name: found[name], path[:-1], raw)[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(raw)


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config.json: the file is \[\]; expected a JSON object"):
        ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\x80\x81")
    with pytest.raises(ConfigError, match=r"config.json: not valid JSON .*; was the download complete"):
        ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config.json: not valid JSON"):
        ModelConfig.from_json(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config.json: cannot be read \(Is a directory\)"):
        ModelConfig.from_json(tmp_path)
