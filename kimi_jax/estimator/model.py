"""What the model weighs and works: bytes and multiply-adds of each part, from the configuration."""

import dataclasses
import functools
import json
from importlib import resources
from typing import Literal

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bits a weight takes, and bytes of what is cached and sent. The default is K2.6's checkpoint.

    INT4 with a bfloat16 scale for each group of 32 is 4.5 bits a weight.
    """

    expert_bits: float = 4.5
    attention_bits: float = 16
    shared_bits: float = 16
    """Shared experts and dense layers."""
    head_bits: float = 16
    cache_bytes: float = 2
    """Of one cached value."""
    dispatch_bytes: float = 2
    """Of one value of a row on its way to an expert; rows come back in bfloat16."""
    expert_arithmetic: Literal["bf16", "fp8", "fp4"] = "bf16"
    dense_arithmetic: Literal["bf16", "fp8"] = "bf16"


K26_PRECISION = Precision()


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Sizes of a DFlash drafter. Defaults: z-lab/Kimi-K2.5-DFlash and Kimi-K2.6-DFlash (3.48 B, 6.96 GB)."""

    block_size: int = 8
    """Positions of one pass, the anchor among them: a draft is at most block_size - 1 deep."""
    num_layers: int = 6
    num_taps: int = 6
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_heads: int = 64
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int = 4096
    """Context tokens whose keys and values are kept."""
    bytes_per_weight: float = 2
    bytes_per_cached_value: float = 2

    @classmethod
    def of(cls, config: DrafterConfig) -> "Drafter":
        """Sizes of a drafter's configuration."""
        return cls(
            block_size=config.block_size,
            num_layers=config.num_hidden_layers,
            num_taps=len(config.target_layer_ids),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            window=config.draft_window,
        )

    @property
    def max_depth(self) -> int:
        """Longest path of a draft tree."""
        return self.block_size - 1

    @property
    def layer_weights(self) -> int:
        """Weights of one layer."""
        attention = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * (attention * self.head_dim + 3 * self.intermediate_size)

    @property
    def weights(self) -> int:
        """All weights: the fusion of the taps and the layers (norms left out)."""
        return self.num_taps * self.hidden_size**2 + self.num_layers * self.layer_weights

    @property
    def cache_bytes_per_token(self) -> float:
        """Keys and values of one context token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_cached_value


@functools.cache
def k26() -> ModelConfig:
    """The configuration of moonshotai/Kimi-K2.6, from the packaged copy of its config.json."""
    text = resources.files("kimi_jax").joinpath("assets", "k26_config.json").read_text()
    return ModelConfig.from_dict(json.loads(text))


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weight counts of one language model, part by part."""

    config: ModelConfig

    @property
    def attention_replicated(self) -> int:
        """One layer's down-projections and norms, which tp does not split."""
        c = self.config
        norms = c.q_lora_rank + c.kv_lora_rank + 2 * c.hidden_size
        return c.hidden_size * (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim) + norms

    @property
    def attention_split(self) -> int:
        """One layer's projections by head, which tp splits."""
        c = self.config
        head = c.q_lora_rank * c.qk_head_dim + c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
        return c.num_attention_heads * (head + c.v_head_dim * c.hidden_size)

    @property
    def router(self) -> int:
        """One MoE layer's router and correction bias."""
        return self.config.n_routed_experts * (self.config.hidden_size + 1)

    @property
    def expert(self) -> int:
        """One routed expert."""
        return 3 * self.config.hidden_size * self.config.moe_intermediate_size

    @property
    def shared(self) -> int:
        """One MoE layer's shared experts."""
        return self.config.n_shared_experts * self.expert

    @property
    def dense(self) -> int:
        """One dense layer's MLP."""
        return 3 * self.config.hidden_size * self.config.intermediate_size

    @property
    def head(self) -> int:
        """The output projection; the embedding has as many."""
        return self.config.vocab_size * self.config.hidden_size


def weight_bytes(config: ModelConfig, precision: Precision = K26_PRECISION) -> dict[str, float]:
    """Bytes of the whole language model by part (K2.6: experts 570.8 GB, all 594.2 GB).

    The router is stored in 16 bits and its correction bias in 32; one last norm is counted with the head.
    """
    w, layers, moe = Weights(config), config.num_hidden_layers, config.num_moe_layers
    attention = (w.attention_replicated + w.attention_split) * precision.attention_bits
    return {
        "attention": layers * attention / 8,
        "router": moe * (2 * w.router + 2 * config.n_routed_experts),
        "experts": moe * config.n_routed_experts * w.expert * precision.expert_bits / 8,
        "shared_expert": moe * w.shared * precision.shared_bits / 8,
        "dense": config.first_k_dense_replace * w.dense * precision.shared_bits / 8,
        "head": w.head * precision.head_bits / 8 + 2 * config.hidden_size,
        "embedding": w.head * 2,
    }


def cache_bytes_per_token(config: ModelConfig, precision: Precision = K26_PRECISION) -> float:
    """Latent and rotary key of one token in all layers: 576 values a layer, 70,272 bytes for K2.6."""
    return config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * precision.cache_bytes
