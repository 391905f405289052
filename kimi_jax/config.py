"""Model configuration, read from an HF `config.json`: every field checked, nothing guessed.

Accepts K2.6's and K2.5's `kimi_k25` (the language model under `text_config`), K2-Thinking's top-level `kimi_k2` and
plain DeepSeek-V3 text configs. The language model is the same; what differs is where the fields stand and whether the
checkpoint's keys begin with `language_model.`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

TEXT_MODEL_TYPES = ("kimi_k2", "deepseek_v3")


class ConfigError(ValueError):
    """A config.json this project cannot run, with the field and what would be accepted."""


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN rope scaling (Peng et al. 2023, arXiv 2309.00071), as in DeepSeek-V3's reference code."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin: the ratio of the two magnitudes (1.0 for K2.6)."""
        return _yarn_magnitude(self.factor, self.mscale) / _yarn_magnitude(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor on the attention scale: m², m = 0.1 · mscale_all_dim · ln(factor) + 1 (2.0047397 for K2.6)."""
        return _yarn_magnitude(self.factor, self.mscale_all_dim) ** 2


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One language model of the K2 family. Field names are those of the HF text config; sizes count elements."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    yarn: Yarn | None
    eos_token_ids: tuple[int, ...]
    quantization_group_size: int
    """Input elements per scale of an INT4 expert weight."""
    key_prefix: str
    """`language_model.` for K2.5 and K2.6, empty otherwise."""
    latent_norm_eps: float = 1e-6
    """Eps of q_a_layernorm and kv_a_layernorm: the reference builds them with its default, not with rms_norm_eps."""

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, position-free and rotary part together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Softmax scale: qk_head_dim^-0.5 · m² (0.14467962580268923 for K2.6)."""
        return self.qk_head_dim**-0.5 * (self.yarn.softmax_factor if self.yarn else 1.0)

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts; the first `first_k_dense_replace` are dense."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelConfig":
        """Reads a config.json, or the one in a checkpoint directory.

        Raises:
          ConfigError: naming the file and the field that is missing, unknown or unsupported.
        """
        return read_config(path, "a checkpoint directory", cls.from_dict)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Builds the configuration from a parsed config.json. Raises ConfigError as `from_json` does."""
        raw = as_object(raw, "the file")
        nested = "text_config" in raw
        text = as_object(raw["text_config"], "text_config") if nested else raw
        model_type = _field(text, "model_type", str)
        if model_type not in TEXT_MODEL_TYPES:
            raise ConfigError(f"model_type {model_type!r} is not supported; known are {', '.join(TEXT_MODEL_TYPES)}")
        _require_supported(raw, text)
        sizes = {
            name: _field(text, name, int)
            for name in (
                "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
                "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size",
                "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace",
                "max_position_embeddings",
            )
        }  # fmt: skip
        for name, value in sizes.items():
            if value < (0 if name == "first_k_dense_replace" else 1):
                raise ConfigError(f"{name} is {value}; it must be positive")
        if sizes["num_experts_per_tok"] > sizes["n_routed_experts"]:
            raise ConfigError("num_experts_per_tok exceeds n_routed_experts")
        if sizes["qk_rope_head_dim"] % 2:
            raise ConfigError(f"qk_rope_head_dim is {sizes['qk_rope_head_dim']}; rope turns pairs, so it must be even")
        parameters = object_field(text, "rope_parameters")
        return cls(
            **sizes,
            routed_scaling_factor=_number(text, "routed_scaling_factor"),
            rms_norm_eps=_number(text, "rms_norm_eps"),
            rope_theta=_number({**parameters, **text}, "rope_theta"),
            yarn=_yarn(object_field(text, "rope_scaling") or parameters),
            eos_token_ids=_eos_token_ids(raw, text),
            quantization_group_size=_quantization_group_size(raw, text, sizes),
            key_prefix="language_model." if nested else "",
            latent_norm_eps=_number({"latent_norm_eps": 1e-6, **text}, "latent_norm_eps"),
        )


def read_config[Config](path: str | Path, where: str, parse: Callable[[Any], Config]) -> Config:
    """Parses a config.json, or the one in a folder. Raises ConfigError naming the file; `where` says what holds one."""
    path = Path(path)
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {where} holds a config.json") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); was the download complete?") from None
    try:
        return parse(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def as_object(value: object, name: str) -> Mapping[str, Any]:
    """A value of a configuration that must be a JSON object. Raises ConfigError naming it."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; expected a JSON object")
    return cast("Mapping[str, Any]", value)


def object_field(source: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object that may be missing or null."""
    return as_object(source.get(name) or {}, name)


def _number(source: Mapping[str, Any], name: str) -> float:
    value = float(_field(source, name, (int, float)))
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; it must be finite")
    return value


def _field(source: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    if source.get(name) is None:
        raise ConfigError(f"{name} is missing")
    value = source[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; expected {kind}")
    return value


def _require_supported(raw: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuses what the model code does not implement, field by field, rather than computing something else."""
    expected: dict[str, tuple[Any, ...]] = {
        "n_group": (1,),
        "topk_group": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True,),
        "hidden_act": ("silu",),
        "moe_layer_freq": (1,),
    }
    for name, accepted in expected.items():
        if name not in text:
            raise ConfigError(f"{name} is missing")
        if text[name] not in accepted:
            raise ConfigError(f"{name} is {text[name]!r}; only {accepted[0]!r} is supported")
    if text.get("attention_bias", False):
        raise ConfigError("attention_bias is true; the K2 family has none")
    if text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)):
        raise ConfigError("tie_word_embeddings is true; the K2 family has a head of its own")
    if text.get("num_nextn_predict_layers", 0):
        raise ConfigError("num_nextn_predict_layers is not 0; multi-token prediction layers are not supported")


def _yarn(scaling: Mapping[str, Any]) -> Yarn | None:
    kind = scaling.get("rope_type", scaling.get("type"))
    if not scaling or kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope_scaling type {kind!r} is not supported; known are 'yarn' and null")
    return Yarn(
        factor=_number(scaling, "factor"),
        original_max_position_embeddings=_field(scaling, "original_max_position_embeddings", int),
        beta_fast=_number(scaling, "beta_fast"),
        beta_slow=_number(scaling, "beta_slow"),
        mscale=_number(scaling, "mscale"),
        mscale_all_dim=_number(scaling, "mscale_all_dim"),
    )


def _eos_token_ids(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids config.json names; the tokenizer adds its own `eos_token` and <|im_end|> (see `decoding`)."""
    named: set[int] = set()
    for source in (raw, text):
        value = source.get("eos_token_id")
        ids = cast("list[Any]", value if isinstance(value, list) else [] if value is None else [value])
        if not all(type(each) is int and each >= 0 for each in ids):
            raise ConfigError(f"eos_token_id is {value!r}; expected a token id or a list of them")
        named.update(ids)
    if not named:
        raise ConfigError("eos_token_id is missing")
    return tuple(sorted(named))


def _quantization_group_size(raw: Mapping[str, Any], text: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    quantization = object_field(text, "quantization_config") or object_field(raw, "quantization_config")
    if not quantization:
        raise ConfigError("quantization_config is missing; routed experts must be INT4 (compressed-tensors)")
    if quantization.get("quant_method") != "compressed-tensors" or quantization.get("format") != "pack-quantized":
        raise ConfigError(
            f"quantization_config is {quantization.get('quant_method')!r} / {quantization.get('format')!r}; "
            "only compressed-tensors / pack-quantized is supported"
        )
    groups = object_field(quantization, "config_groups")
    if len(groups) != 1:
        raise ConfigError(f"quantization_config has {len(groups)} config_groups; exactly one is supported")
    ((group, settings),) = groups.items()
    weights = object_field(as_object(settings, group), "weights")
    for name, wanted in {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}.items():
        if weights.get(name) != wanted:
            raise ConfigError(f"quantization {name} is {weights.get(name)!r}; only {wanted!r} is supported")
    if weights.get("actorder") not in (None, False):
        raise ConfigError(f"quantization actorder is {weights['actorder']!r}; only null is supported")
    size = _field(weights, "group_size", int)
    for name in ("hidden_size", "moe_intermediate_size"):
        if size < 8 or size % 8 or sizes[name] % size:
            raise ConfigError(f"quantization group_size {size} does not divide {name} {sizes[name]} in whole words")
    return size
