"""Configurations of the family are read, and what the model does not implement is refused by name."""

import contextlib
import copy
import functools
import json
import math
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
        ("kimi_k2_thinking.json", "", 163586),
        ("deepseek_v3.json", "", None),
    ],
)
def test_other_variants(name, prefix, eos):
    config = ModelConfig.from_json(CONFIGS / name)
    assert config.key_prefix == prefix
    assert eos is None or eos in config.eos_token_ids


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


@pytest.mark.parametrize("field", ["factor", "beta_fast", "mscale_all_dim", "original_max_position_embeddings"])
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
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, named):
    raw = copy.deepcopy(REAL)
    raw["text_config"] |= change
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_bits", 8), ("type", "float"), ("symmetric", False), ("strategy", "channel"), ("actorder", "group")],
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


@pytest.mark.parametrize("path", fields(REAL), ids=".".join)
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
        (("text_config", "eos_token_id"), "[EOS]", r"eos_token_id is '\[EOS\]'; expected a token id or a list"),
        (("text_config", "rms_norm_eps"), float("nan"), "rms_norm_eps is nan; it must be finite"),
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
