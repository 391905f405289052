"""From a finished run to the files that everything else uses: INT4 experts, bfloat16 weights, the HF layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax.checkpoint.writer import save
from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.drafter.dflash import DFlash
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parameters import Parameters
from kimi_jax.quantization import Int4Weight, dequantize, quantize
from kimi_jax.text_files import write_text
from kimi_jax.tokenizer import CONFIG_FILE, VOCABULARY_FILE

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def quantize_experts(parameters: Parameters, config: ModelConfig) -> Parameters:
    """The training weights as the inference model takes them: routed experts as INT4 (absmax / 7)."""
    return _map_experts(parameters, lambda weight: quantize(weight, config.quantization_group_size))


def dequantize_experts(parameters: Parameters) -> Parameters:
    """The inference model's weights as the training model takes them, experts exactly as the INT4 ones count."""
    return _map_experts(parameters, dequantize)


def _map_experts(parameters: Parameters, change: Any) -> Parameters:
    copied = jax.tree.map(lambda leaf: leaf, parameters, is_leaf=lambda node: isinstance(node, Int4Weight))
    for layer in copied["model"]["layers"].values():
        experts = layer["mlp"].get("experts")
        for name in EXPERT_PROJECTIONS if experts else ():
            experts[name] = change(experts[name])
    return copied


def export_target(
    parameters: Parameters, config_json: Mapping[str, Any], tokenizer_directory: Path, output: Path
) -> None:
    """Writes a trained target as a K2.6-layout checkpoint folder; `output` must be empty or absent."""
    config = ModelConfig.from_dict(config_json)
    generation = tokenizer_directory / "generation_config.json"
    limits = {"eos_token_id": config_json["eos_token_id"], "max_length": 1024}
    write_text(generation, json.dumps(limits, indent=2) + "\n")
    save(
        output,
        quantize_experts(parameters, config),
        CausalLM(config),
        config_json,
        config.key_prefix,
        dtype=jnp.bfloat16,
        num_experts=config.n_routed_experts,
        extra_files=[tokenizer_directory / VOCABULARY_FILE, tokenizer_directory / CONFIG_FILE, generation],
    )


def export_drafter(parameters: Parameters, config_json: Mapping[str, Any], output: Path) -> None:
    """Writes a trained drafter with the public drafters' keys; `output` must be empty or absent."""
    module = DFlash(DrafterConfig.from_dict(config_json))
    save(output, parameters, module, config_json, "", dtype=jnp.bfloat16, num_experts=0)
