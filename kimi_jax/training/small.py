"""The bundled small model: K2.6's architecture with sizes that two CPU cores can train in under an hour."""

from typing import Any

from kimi_jax.config import ModelConfig
from kimi_jax.tokenizer import Tokenizer

TAPS = (0, 2, 3)
"""Target layers whose output the small drafter reads."""
VOCABULARY_MULTIPLE = 32
"""Rows of the embedding are padded to this, so that every tp size up to 32 divides them."""


def config_dict(tokenizer: Tokenizer, **sizes: int) -> dict[str, Any]:
    """The small model's config.json, with K2.6's fields and nesting. `sizes` replaces fields of the text config."""
    vocab_size = -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    special = {name: tokenizer.special_id(name) for name in ("[BOS]", "[EOS]", "<|im_end|>", "[PAD]")}
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": sizes.get("num_attention_heads", 8),
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "intermediate_size": 384,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": special["[BOS]"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["[PAD]"],
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 32,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                    },
                }
            },
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
            ],
        },
        **sizes,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def config(tokenizer: Tokenizer, **sizes: int) -> ModelConfig:
    """The small model's configuration."""
    return ModelConfig.from_dict(config_dict(tokenizer, **sizes))


def drafter_config_dict(target: ModelConfig, mask_token_id: int, **sizes: int) -> dict[str, Any]:
    """config.json of the small target's DFlash drafter, with the public drafters' fields. `sizes` replaces fields."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_hidden_layers,
        "block_size": 8,
        "acceptance_length": 6.0,  # tokens emitted a round with 7 nodes, on 100 held-out prompts of each family
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(TAPS)},
        "dtype": "bfloat16",
        **sizes,
    }
