"""Drafter configuration, read from a DFlash drafter's `config.json` and checked against the target it drafts for.

Fields stand at the top level (a Qwen3 text config) or in `dflash_config`; where both name one, `dflash_config` counts,
as in the reference package `dflash` 0.1.0.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from kimi_jax.config import EPS, ModelConfig, Yarn, read_rope
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
)

LayerType = Literal["full_attention", "sliding_attention"]
SUPPORTED = {
    "hidden_act": ("silu", "swish"), "attention_bias": (False,),
    "projector_type": ("dflash",),  # domino and dspark add a sequential head
    "shift_label": (False,), "attention_sink_bias": (False,), "attention_value_scale": (1,),
}  # fmt: skip
"""Fields that may be missing or null, with the values that are implemented."""
DEFAULT_DRAFT_WINDOW = 4096
"""Context positions a drafter sees, as the public Kimi drafters are served."""


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A DFlash or DFlash 2 drafter. Field names are those of the public configurations; sizes count elements."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    """Frequencies only: the amplitude is `attention_factor`, whatever its mscale fields say."""
    attention_factor: float
    """Factor on cos and sin."""
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    """Taps: 0-based target layers whose output residual (after the layer, before any final norm) is the context."""
    block_size: int
    """Tokens of a block, the anchor included: `block_size` - 1 are drafted."""
    mask_token_id: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None
    is_causal: bool | None
    """Whether a block's tokens see only earlier ones; None means in sliding layers and not in full ones."""
    draft_window: int
    """Latest context positions that are kept; all layers see at most these."""
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int | None = None
    """DFlash 2: taps of the convolutions around attention and MLP; None for DFlash."""
    conv_group_size: int | None = None
    selector_rank: int | None = None
    """DFlash 2: rank of the candidate selector; None for DFlash."""
    selector_top_k: int | None = None
    acceptance_length: float | None = None
    """Tokens a round with a tree of 7 nodes, as whoever trained the drafter measured; an automatic budget starts from
    it. This project writes it; public drafters do not state it."""

    def causal(self, layer: int) -> bool:
        """Whether the layer's block tokens see only earlier block tokens."""
        return self.layer_types[layer] == "sliding_attention" if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Sliding window of the layer in positions, None where it has none."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @classmethod
    def from_json(
        cls, path: str | Path, *, draft_window: int = DEFAULT_DRAFT_WINDOW, attention_factor: float | None = None
    ) -> "DrafterConfig":
        """Reads a config.json, or the one in a drafter's folder; the overrides are `from_dict`'s.

        Raises:
          ConfigError: naming the file and the field that is missing, unknown or unsupported.
        """
        parse = functools.partial(cls.from_dict, draft_window=draft_window, attention_factor=attention_factor)
        return read_config(path, "a drafter's folder", parse)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, draft_window: int = DEFAULT_DRAFT_WINDOW, attention_factor: float | None = None
    ) -> "DrafterConfig":
        """Builds the configuration from a parsed config.json.

        Args:
          raw: the JSON object.
          draft_window: context positions to keep.
          attention_factor: replaces the configuration's factor on cos and sin. Engines disagree about Kimi drafters:
            transformers takes 1.0 where mscale equals mscale_all_dim, others 0.1 ln(factor) + 1. Measure both.

        Raises:
          ConfigError: naming the field.
        """
        raw = as_object(raw, "the file")
        fields = Fields({**raw, **Fields(raw).object("dflash_config").values})
        fields.require(SUPPORTED)
        count = functools.partial(fields.integer, low=1, high=MAX_WIDTH)
        layers, heads, hidden = count("num_hidden_layers"), count("num_attention_heads"), count("hidden_size")
        vocab = fields.integer("vocab_size", 1, 2**24)
        target_layers = count("num_target_layers")
        kv_heads = count("num_key_value_heads", default=heads)
        head_dim = count("head_dim", default=hidden // heads)
        if heads % kv_heads:
            raise ConfigError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        if head_dim % 2:
            raise ConfigError(f"head_dim is {head_dim}; rope turns pairs, so it must be even")
        fields.number("attention_dropout", 0, 1, 0)  # of training alone
        window = Fields({"draft_window": draft_window}).integer("draft_window", 1, MAX_INT32)
        theta, yarn = read_rope(fields)
        if attention_factor is None:
            attention_factor = yarn.amplitude if yarn else 1.0
        layer_types, sliding_window = _layer_types(fields, layers)
        if sliding_window is not None and "full_attention" not in layer_types:
            window = min(window, sliding_window)  # nothing that is further away is ever seen
        return cls(
            vocab_size=vocab,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=count("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", *EPS),
            rope_theta=theta,
            yarn=yarn,
            attention_factor=attention_factor,
            num_target_layers=target_layers,
            target_layer_ids=_taps(fields, target_layers, layers),
            # The anchor and at least one drafted token make 2.
            block_size=fields.integer("block_size", 2, MAX_WIDTH, 16),
            mask_token_id=_mask_token_id(fields, vocab),
            layer_types=layer_types,
            sliding_window=sliding_window,
            is_causal=None if fields.values.get("is_causal") is None else fields.boolean("is_causal", False),
            draft_window=window,
            input_embedding_scale=fields.number("input_embedding_scale", SMALLEST, LARGEST, 1.0),
            output_multiplier=fields.number("output_multiplier", SMALLEST, LARGEST, 1.0),
            final_logit_softcapping=fields.number("final_logit_softcapping", 0.0, LARGEST, 0.0) or None,
            acceptance_length=fields.number("acceptance_length", 0.0, MAX_WIDTH, 0.0) or None,
            **_dflash2(fields, hidden, vocab),
        )

    def check(self, target: ModelConfig, name: str | Path = "the drafter") -> None:
        """Refuses a drafter that was not made for this target, field by field; `name` is its folder, for the message.

        Raises:
          ConfigError: naming every field that does not fit.
        """
        pairs = {
            "num_target_layers": (self.num_target_layers, "num_hidden_layers", target.num_hidden_layers),
            "hidden_size": (self.hidden_size, "hidden_size", target.hidden_size),
            "vocab_size": (self.vocab_size, "vocab_size", target.vocab_size),
        }
        problems = [
            f"{field} is {value}, the target's {name} is {wanted}"
            for field, (value, name, wanted) in pairs.items()
            if value != wanted
        ]
        beyond = [tap for tap in self.target_layer_ids if tap >= target.num_hidden_layers]
        if beyond:
            problems.append(f"target_layer_ids {beyond} do not exist: the target has {target.num_hidden_layers} layers")
        if self.mask_token_id >= target.vocab_size:
            problems.append(f"mask_token_id {self.mask_token_id} is not in the target's vocabulary")
        if problems:
            raise ConfigError(f"{name} does not fit the target: {'; '.join(problems)}")


def _taps(fields: Fields, target_layers: int, layers: int) -> tuple[int, ...]:
    taps = fields.values.get("target_layer_ids")
    if taps is None:
        # The reference's default: evenly from layer 1 to the third from the last.
        span = (target_layers - 4) / max(layers - 1, 1)
        taps = [target_layers // 2] if layers == 1 else [round(1 + i * span) for i in range(layers)]
    whole = isinstance(taps, list | tuple) and all(type(tap) is int for tap in taps)
    if not whole or not taps or len(set(taps)) < len(taps):
        raise ConfigError(f"target_layer_ids is {shown(taps)}; expected a list of different layer numbers")
    outside = [tap for tap in taps if not 0 <= tap < target_layers]
    if outside:
        raise ConfigError(f"target_layer_ids {outside} are not 0-based layers of num_target_layers = {target_layers}")
    return tuple(taps)


def _mask_token_id(fields: Fields, vocab: int) -> int:
    if fields.values.get("mask_token_id") is None:
        raise ConfigError("mask_token_id is missing; a mask_token must be given as its id in the target's vocabulary")
    return fields.integer("mask_token_id", 0, vocab - 1)


def _layer_types(fields: Fields, layers: int) -> tuple[tuple[LayerType, ...], int | None]:
    types = fields.values.get("layer_types")
    if not types:
        # It would say which layers slide.
        fields.require({"use_sliding_window": (False,)})
        types = ["full_attention"] * layers
    known = get_args(LayerType)
    if not isinstance(types, list | tuple) or len(types) != layers or any(kind not in known for kind in types):
        raise ConfigError(f"layer_types is {shown(types)}; expected {layers} of {' or '.join(known)}")
    window = fields.integer("sliding_window", 1, MAX_INT32) if "sliding_attention" in types else None
    return cast(tuple[LayerType, ...], tuple(types)), window


def _dflash2(fields: Fields, hidden: int, vocab: int) -> dict[str, int]:
    limits = {
        "conv_kernel_size": MAX_WIDTH,
        "conv_group_size": hidden,
        "selector_rank": MAX_WIDTH,
        "selector_top_k": vocab,
    }
    if all(fields.values.get(name) is None for name in limits):
        return {}
    values = {name: fields.integer(name, 1, high) for name, high in limits.items()}
    if hidden % values["conv_group_size"]:
        raise ConfigError(f"conv_group_size {values['conv_group_size']} does not divide hidden_size {hidden}")
    return values
