"""Write the other configurations of this folder from K2.6's: `uv run tests/data/configs/derive.py`.

Each function states what differs from `kimi_k26.json`, which is the published file and is never written here.
"""

import copy
import json
from pathlib import Path

FOLDER = Path(__file__).parent
OLDER_IGNORE = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


def kimi_k25(k26: dict) -> dict:
    """An older K2.5 revision: [EOS] is the stop token, and the ignore list names lm_head without a regex."""
    config = copy.deepcopy(k26)
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = 163585
    config["text_config"]["quantization_config"]["ignore"] = OLDER_IGNORE
    return config


def kimi_k27_code(k26: dict) -> dict:
    """K2.7-Code, of K2.5's and K2.6's architecture: saved by a later transformers, which changes no other field."""
    config = copy.deepcopy(k26)
    config["text_config"]["transformers_version"] = "4.57.1"
    return config


def kimi_k27_drafter(k26: dict) -> dict:
    """A DFlash drafter of K2.7-Code: the K2.6 drafter's fields, but all layers see 2,048 positions of the context."""
    text = k26["text_config"]
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 7168, "head_dim": 128,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 6, "intermediate_size": 18432,
        "rms_norm_eps": 1e-5, "num_target_layers": 61, "block_size": 8, "vocab_size": 163840, "hidden_act": "silu",
        "max_position_embeddings": 262144, "rope_theta": 50000.0, "attention_bias": False,
        "rope_scaling": text["rope_scaling"], "layer_types": ["sliding_attention"] * 6, "sliding_window": 2048,
        "use_sliding_window": True, "is_causal": False,
        "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838},
    }  # fmt: skip


def kimi_k2_thinking(k26: dict) -> dict:
    """K2-Thinking: the text config at the top level; the YaRN ramp one dimension wide (beta_fast = beta_slow)."""
    config = copy.deepcopy(k26["text_config"])
    config["quantization_config"]["ignore"] = OLDER_IGNORE
    config["rope_scaling"]["beta_fast"] = 1.0
    return config


def deepseek_v3(k26: dict) -> dict:
    """A DeepSeek-V3 text config as transformers 5 writes it: `rope_parameters` in place of rope_theta and rope_scaling.

    DeepSeek-V3's own sizes, except for n_group = topk_group = 1 and no prediction layer; experts INT4 as in K2.6.
    """
    text = k26["text_config"]
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
        "bos_token_id": 0, "dtype": "bfloat16", "eos_token_id": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "quantization_config": text["quantization_config"], "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_type": "yarn",
        },
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip


if __name__ == "__main__":
    k26 = json.loads((FOLDER / "kimi_k26.json").read_text())
    for derive in (kimi_k25, kimi_k27_code, kimi_k27_drafter, kimi_k2_thinking, deepseek_v3):
        text = json.dumps(derive(k26), indent=2, sort_keys=True)
        (FOLDER / f"{derive.__name__}.json").write_text(text + "\n")
