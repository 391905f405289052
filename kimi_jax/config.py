"""Model configuration, read from an HF `config.json`: every field checked, nothing guessed.

Accepts K2.6's and K2.5's `kimi_k25` (the language model under `text_config`), K2-Thinking's top-level `kimi_k2` and
plain DeepSeek-V3 text configs. The language model is the same; what differs is where the fields stand and whether the
checkpoint's keys begin with `language_model.`.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_jax.config_fields import (
    LARGEST,
    MAX_INT32,
    MAX_WIDTH,
    SMALLEST,
    ConfigError,
    Fields,
    as_object,
    read_config,
    shown,
    token_ids,
)

TEXT_MODEL_TYPES = ("kimi_k2", "deepseek_v3")

_WIDTH = (1, MAX_WIDTH)
SIZES = {
    "vocab_size": (1, 2**24), "hidden_size": _WIDTH, "num_hidden_layers": (1, 10_000), "num_attention_heads": _WIDTH,
    "q_lora_rank": _WIDTH, "kv_lora_rank": _WIDTH, "qk_nope_head_dim": _WIDTH, "qk_rope_head_dim": _WIDTH,
    "v_head_dim": _WIDTH, "intermediate_size": _WIDTH, "moe_intermediate_size": _WIDTH, "n_routed_experts": _WIDTH,
    "num_experts_per_tok": _WIDTH, "n_shared_experts": _WIDTH, "first_k_dense_replace": (0, 10_000),
    "max_position_embeddings": (1, MAX_INT32),
}  # fmt: skip
"""Fields that count something, with the smallest and largest number that makes sense."""

REQUIRED = {
    "n_group": (1,), "topk_group": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,), "hidden_act": ("silu", "swish"), "moe_layer_freq": (1,),
}  # fmt: skip
"""Fields that must be there, with the values the model code implements. Others would compute something else."""

IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "tie_word_embeddings": (False,), "num_nextn_predict_layers": (0,),
    "num_mtp_layers": (0,), "pretraining_tp": (1,), "is_causal": (True,), "sliding_window": (),
    "attention_chunk_size": (), "per_layer_config": (), "kv_sharing_modes": (), "compression_config": (),
}  # fmt: skip
"""Fields that may be missing or null, and that the code of transformers, its masks and caches reads."""

QUANTIZATION = {"quant_method": ("compressed-tensors",), "format": ("pack-quantized",)}
QUANTIZATION_OTHER: Mapping[str, tuple[Any, ...]] = {
    "quantization_status": ("compressed",), "kv_cache_scheme": (), "sparsity_config": ({},), "transform_config": ({},),
    "moe_sparsity_config": (),
}  # fmt: skip
QUANTIZATION_NEUTRAL = ("ignore", "global_compression_ratio", "version", "run_compressed", "dequantize")
"""Which tensors are packed is decided by the keys a checkpoint has, not by `ignore` and `targets`."""
GROUP: Mapping[str, tuple[Any, ...]] = {
    "format": ("pack-quantized",), "input_activations": (), "output_activations": (),
}  # fmt: skip
WEIGHTS = {"num_bits": (4,), "type": ("int",), "symmetric": (True,), "strategy": ("group",)}
WEIGHTS_OTHER: Mapping[str, tuple[Any, ...]] = {
    "dynamic": (False,), "actorder": (False,), "block_structure": (), "scale_dtype": ("torch.bfloat16", "bfloat16"),
    "zp_dtype": ("torch.int8", "int8"),
}  # fmt: skip

EPS = (1e-30, 1.0)
CODES_PER_WORD = 8
"""INT4 codes in an int32 word of a checkpoint."""


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN rope scaling (Peng et al. 2023, arXiv 2309.00071) with the fields of transformers' `rope_parameters`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    """Factor on cos and sin that counts instead of what the two magnitudes give."""
    truncate: bool = True
    """Whether the blend between fast and slow pairs begins and ends at whole pairs."""

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin: the ratio of the two magnitudes where both are given (1.0 for K2.6)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if not (self.mscale and self.mscale_all_dim):
            return _yarn_magnitude(self.factor, 1.0)
        return _yarn_magnitude(self.factor, self.mscale) / _yarn_magnitude(self.factor, self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor on the attention scale: m², m = 0.1 · mscale_all_dim · ln(factor) + 1 (2.0047397 for K2.6)."""
        return _yarn_magnitude(self.factor, self.mscale_all_dim) ** 2


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


ROPE_FIELDS = {"default": (), "yarn": tuple(field.name for field in dataclasses.fields(Yarn))}
"""Types of rotary embedding that are implemented, and their fields."""


def read_rope(fields: Fields) -> tuple[float, Yarn | None]:
    """Base and scaling of the rotary embedding, where and as transformers 5 reads them.

    `rope_scaling` counts before `rope_parameters`, and a rope_theta inside before the one beside it.

    Raises:
      ConfigError: types and fields that are not implemented, or numbers out of range.
    """
    name = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = fields.object(name)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in tuple(ROPE_FIELDS):
        raise ConfigError(f"{name} type {shown(kind)} is not supported; known are 'yarn', 'default' and null")
    rope.only(
        ("rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_FIELDS[kind]), f"the rope type {kind!r}"
    )
    for each in (fields, rope):
        each.require({"partial_rotary_factor": (1,)})
    holder = rope if rope.values.get("rope_theta") is not None else fields
    theta = holder.number("rope_theta", 2, 1e12)
    if kind == "default":
        return theta, None
    original = rope.integer("original_max_position_embeddings", 1, MAX_INT32)
    fields.require({"original_max_position_embeddings": (original,)})
    fast = rope.number("beta_fast", SMALLEST, LARGEST, 32.0)
    factor = rope.values.get("attention_factor")
    return theta, Yarn(
        factor=rope.number("factor", 1, LARGEST),
        original_max_position_embeddings=original,
        beta_fast=fast,
        beta_slow=rope.number("beta_slow", SMALLEST, fast, 1.0),
        mscale=rope.number("mscale", 0, LARGEST, 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0, LARGEST, 0.0),
        attention_factor=None if factor is None else rope.number("attention_factor", SMALLEST, LARGEST),
        truncate=rope.boolean("truncate", True),
    )


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
    rope_interleave: bool = True
    """Whether the rotary pairs are dims (2i, 2i+1), or else (i, i + half)."""

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
        """Builds the configuration from a parsed config.json.

        Raises:
          ConfigError: as `from_json` does.
        """
        top = Fields(as_object(raw, "the file"))
        nested = "text_config" in top.values
        text = Fields(as_object(raw["text_config"], "text_config"), "text_config.") if nested else top
        model_type = text.values.get("model_type")
        if model_type not in TEXT_MODEL_TYPES:
            raise ConfigError(f"{text.path}model_type is {shown(model_type)}; known are {', '.join(TEXT_MODEL_TYPES)}")
        text.require(REQUIRED, present=True)
        for fields in (top, text):
            fields.require(IMPLEMENTED)
        sizes = {name: text.integer(name, *limits) for name, limits in SIZES.items()}
        _check_sizes(text, sizes)
        for fields in (top, text):
            for name in ("bos_token_id", "pad_token_id"):
                token_ids(fields, name, sizes["vocab_size"])
        stop_ids = {i for fields in (top, text) for i in token_ids(fields, "eos_token_id", sizes["vocab_size"])}
        if not stop_ids:
            raise ConfigError("eos_token_id is missing")
        theta, yarn = read_rope(text)
        return cls(
            **sizes,
            routed_scaling_factor=text.number("routed_scaling_factor", SMALLEST, LARGEST),
            rms_norm_eps=text.number("rms_norm_eps", *EPS),
            rope_theta=theta,
            yarn=yarn,
            eos_token_ids=tuple(sorted(stop_ids)),
            quantization_group_size=_quantization_group_size(top, text, sizes),
            key_prefix="language_model." if nested else "",
            latent_norm_eps=text.number("latent_norm_eps", *EPS, 1e-6),
            rope_interleave=text.boolean("rope_interleave", True),
        )


def _check_sizes(text: Fields, sizes: Mapping[str, int]) -> None:
    """Refuses sizes that contradict each other or another field that states one of them."""
    text.integer("num_experts_per_tok", 1, sizes["n_routed_experts"])
    text.integer("first_k_dense_replace", 0, sizes["num_hidden_layers"] - 1)
    if sizes["qk_rope_head_dim"] % 2:
        raise ConfigError(f"qk_rope_head_dim is {sizes['qk_rope_head_dim']}; rope turns pairs, so it must be even")
    text.number("attention_dropout", 0, 1, 0)  # of training alone
    same = {
        "num_key_value_heads": "num_attention_heads",
        "head_dim": "qk_rope_head_dim",
        "num_local_experts": "n_routed_experts",
    }
    for name, other in same.items():
        text.require({name: (sizes[other],)})
    layer_types = text.values.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * sizes["num_hidden_layers"]:
        raise ConfigError(
            f"{text.path}layer_types is {shown(layer_types)}; only full_attention in every layer is known"
        )


def _quantization_group_size(top: Fields, text: Fields, sizes: Mapping[str, int]) -> int:
    quantization = text.object("quantization_config")
    if not quantization.values:
        quantization = top.object("quantization_config")
    elif top.values.get("quantization_config") not in (None, text.values["quantization_config"]):
        raise ConfigError("quantization_config and text_config.quantization_config differ; only one can hold")
    if not quantization.values:
        raise ConfigError("quantization_config is missing; routed experts must be INT4 (compressed-tensors)")
    quantization.require(QUANTIZATION, present=True)
    quantization.only(
        (*QUANTIZATION, *QUANTIZATION_OTHER, *QUANTIZATION_NEUTRAL, "config_groups"), "compressed-tensors"
    )
    quantization.require(QUANTIZATION_OTHER)
    groups = quantization.object("config_groups")
    if len(groups.values) != 1:
        raise ConfigError(f"{groups.path[:-1]} has {len(groups.values)} groups; exactly one is supported")
    (name,) = groups.values
    group = Fields(as_object(groups.values[name], groups.path + name), f"{groups.path}{name}.")
    group.only((*GROUP, "targets", "weights"), "compressed-tensors' groups")
    group.require(GROUP)
    weights = group.object("weights")
    weights.only((*WEIGHTS, *WEIGHTS_OTHER, "group_size", "observer", "observer_kwargs"), "compressed-tensors' weights")
    weights.require(WEIGHTS, present=True)
    weights.require(WEIGHTS_OTHER)
    size = weights.integer("group_size", CODES_PER_WORD, MAX_WIDTH)
    for name in ("hidden_size", "moe_intermediate_size"):
        if size % CODES_PER_WORD or sizes[name] % size:
            raise ConfigError(f"{weights.path}group_size {size} does not divide {name} {sizes[name]} in whole words")
    return size
