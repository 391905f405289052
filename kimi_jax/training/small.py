"""The bundled small model: K2.6's architecture with sizes that two CPU cores can train in under an hour.

The sizes are those of the bundled checkpoints' own config.json; what depends on the tokenizer and the target is filled
in anew.
"""

from typing import Any

from kimi_jax.config import ModelConfig
from kimi_jax.ledger.models import asset
from kimi_jax.tokenizer import Tokenizer

VOCABULARY_MULTIPLE = 32
"""Rows of the embedding are padded to this, so that every tp size up to 32 divides them."""


def config_dict(tokenizer: Tokenizer, **sizes: int) -> dict[str, Any]:
    """The small model's config.json, with K2.6's fields and nesting. `sizes` replaces fields of the text config."""
    names = {"bos_token_id": "[BOS]", "eos_token_id": "<|im_end|>", "pad_token_id": "[PAD]"}
    special = {field: tokenizer.special_id(name) for field, name in names.items()}
    vocab_size = -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    whole = asset("small/config.json") | special
    heads = sizes.get("num_attention_heads", whole["text_config"]["num_attention_heads"])
    whole["text_config"] |= special | {"vocab_size": vocab_size, "num_key_value_heads": heads} | sizes
    return whole


def config(tokenizer: Tokenizer, **sizes: int) -> ModelConfig:
    """The small model's configuration."""
    return ModelConfig.from_dict(config_dict(tokenizer, **sizes))


def drafter_config_dict(target: ModelConfig, mask_token_id: int, **sizes: int) -> dict[str, Any]:
    """config.json of the small target's DFlash drafter, with the public drafters' fields. `sizes` replaces fields."""
    whole = asset("small_drafter/config.json")
    whole["dflash_config"]["mask_token_id"] = mask_token_id
    of_target = ("hidden_size", "vocab_size", "max_position_embeddings")
    fitted = {name: getattr(target, name) for name in of_target}
    return whole | fitted | {"num_target_layers": target.num_hidden_layers} | sizes
