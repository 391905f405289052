"""Random checkpoints in the K2 family's layout on disk, used by make_reference.py; needs torch and compressed-tensors.

`write_tiny` writes tests/data/tiny_random, `write_variant` tests/data/variant_ct, and `write_drafter`
tests/data/tiny_random_drafter. Their bytes are the same on every run.
"""

import json
import math
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from kimi_jax.tokenizer import write_tokenizer

DATA = Path(__file__).parent
Tensors = dict[str, torch.Tensor]

SPECIAL_IDS = 256  # ids kept behind the ranks of tiktoken.model for special tokens
TINY = {
    "hidden_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
}  # fmt: skip
VARIANT = TINY | {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 512, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "rope_scaling": None, "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 511,
}  # fmt: skip
TINY_VISION = {
    "vt_hidden_size": 32, "vt_intermediate_size": 48, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2,
    "init_pos_emb_height": 8, "init_pos_emb_width": 8, "mm_hidden_size": 32, "text_hidden_size": 128,
}  # fmt: skip


def tiny_config(first_special: int) -> dict:
    """K2.6's config.json with small dimensions and special ids counted from `first_special`."""
    config = json.loads((DATA / "configs" / "kimi_k26.json").read_text())
    shift = first_special - config["bos_token_id"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
        config[key] += shift
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config["text_config"][key] = config[key]
    config["text_config"] |= TINY | {"vocab_size": first_special + SPECIAL_IDS}
    config["vision_config"] |= TINY_VISION
    return config


def variant_config() -> dict:
    """A second, smaller configuration as K2-Thinking writes it: the text config at the top, and without YaRN."""
    return json.loads((DATA / "configs" / "kimi_k26.json").read_text())["text_config"] | VARIANT


# ------------------------------------------------------------------------------------------------------ weights


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Every logical weight of the language model, in a fixed order; experts unquantised."""
    hidden, heads, qk = c["hidden_size"], c["num_attention_heads"], c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    out = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}

    def mlp(name: str, width: int) -> None:
        for proj in ("gate_proj", "up_proj"):
            out[f"{name}.{proj}.weight"] = (width, hidden)
        out[f"{name}.down_proj.weight"] = (hidden, width)

    for layer in range(c["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        attention = {
            "q_a_proj": (c["q_lora_rank"], hidden), "q_a_layernorm": (c["q_lora_rank"],),
            "q_b_proj": (heads * qk, c["q_lora_rank"]),
            "kv_a_proj_with_mqa": (c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden),
            "kv_a_layernorm": (c["kv_lora_rank"],),
            "kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
            "o_proj": (hidden, heads * c["v_head_dim"]),
        }  # fmt: skip
        out |= {f"{name}self_attn.{key}.weight": shape for key, shape in attention.items()}
        out |= {f"{name}{key}.weight": (hidden,) for key in ("input_layernorm", "post_attention_layernorm")}
        if layer < c["first_k_dense_replace"]:
            mlp(name + "mlp", c["intermediate_size"])
            continue
        out[name + "mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        out[name + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        mlp(name + "mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
        for expert in range(c["n_routed_experts"]):
            mlp(f"{name}mlp.experts.{expert}", c["moe_intermediate_size"])
    return out | {"model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}


def random_weights(c: dict, generator: torch.Generator) -> Tensors:
    """BF16 weights (the correction bias float32) whose sizes make every part of the model show in the logits.

    The residual stream and the latents are kept small, so that absolute tolerances mean something on hidden states and
    a wrong eps of either kind of norm is seen.
    """
    weights = {}
    for name, shape in shapes(c).items():
        draw = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.15 * draw
            continue
        if "norm.weight" in name:
            draw = 1 + 0.2 * draw
        elif "embed_tokens" in name:
            draw = 0.06 * draw
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            draw *= (0.15 if residual else 1.4 if name.endswith("mlp.gate.weight") else 1.2) / math.sqrt(shape[-1])
        if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
            draw[: shape[0] - (c["qk_rope_head_dim"] if "mqa" in name else 0)] *= 0.1
        weights[name] = draw.bfloat16()
    return weights


def vision_tensors(v: dict, generator: torch.Generator) -> Tensors:
    """Vision tower and projector, of sizes that make every part of them show in the rows they give."""
    width, inner, merged = v["vt_hidden_size"], v["vt_intermediate_size"], v["mm_hidden_size"] * 4
    out = {
        "mm_projector.pre_norm.weight": (width,), "mm_projector.pre_norm.bias": (width,),
        "mm_projector.proj.0.weight": (merged, merged), "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (v["text_hidden_size"], merged),
        "mm_projector.proj.2.bias": (v["text_hidden_size"],),
        "vision_tower.patch_embed.proj.weight": (width, 3, v["patch_size"], v["patch_size"]),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (v["init_pos_emb_height"], v["init_pos_emb_width"], width),
    }  # fmt: skip
    block = {"mlp.fc0": (inner, width), "mlp.fc1": (width, inner), "norm0": (width,), "norm1": (width,),
             "wo": (width, width), "wqkv": (3 * width, width)}  # fmt: skip
    named = {
        f"encoder.blocks.{i}.{key}": shape for i in range(v["vt_num_hidden_layers"]) for key, shape in block.items()
    }
    for key, shape in (named | {"encoder.final_layernorm": (width,)}).items():
        out |= {f"vision_tower.{key}.weight": shape, f"vision_tower.{key}.bias": shape[:1]}

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        draw = torch.randn(shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            return 1 + 0.2 * draw
        if len(shape) == 1 or "pos_emb" in name:
            return draw * (0.2 if len(shape) == 1 else 0.5)
        return draw * (0.06 if "proj.2" in name else 1.2) / math.sqrt(math.prod(shape[1:]))

    return {name: draw(name, shape).bfloat16() for name, shape in out.items()}


def pack_experts(weights: Tensors, quantization: dict, *, scale_rule: str, shape_dtype: torch.dtype) -> Tensors:
    """Replace every routed expert's weight by weight_packed, weight_scale and weight_shape (compressed-tensors).

    `scale_rule` "absmax/7" is Moonshot's (codes -7 to 7), "absmax/7.5" is compressed-tensors' own (-8 occurs).
    """
    arguments = QuantizationArgs(**quantization["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], format="pack-quantized", weights=arguments)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    out = {}
    for name, weight in weights.items():
        if ".mlp.experts." not in name:
            out[name] = weight
            continue
        groups = weight.float().unflatten(-1, (-1, arguments.group_size))
        if scale_rule == "absmax/7":
            scale = groups.abs().amax(-1) / 7
        else:
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
        packed = compressor.compress({"weight": weight, "weight_scale": scale.bfloat16()}, scheme)
        base = name.removesuffix("weight")
        out[base + "weight_packed"] = packed["weight_packed"]
        out[base + "weight_scale"] = packed["weight_scale"]
        out[base + "weight_shape"] = packed["weight_shape"].to(shape_dtype)
    return out


def expert_codes(tensors: Tensors, name: str) -> torch.Tensor:
    """The signed codes, -8 to 7, of one packed weight."""
    shape = torch.Size(tensors[name + "weight_shape"].tolist())
    return unpack_from_int32(tensors[name + "weight_packed"], 4, shape)


# ------------------------------------------------------------------------------------------------------ writing


def write_checkpoint(directory: Path, config: dict, text: Tensors, vision: Tensors, prefix: str) -> None:
    """Shards as Moonshot cuts them: one per layer, then embedding, norm and head, then projector, then vision tower."""
    text_config = config.get("text_config", config)
    layers = text_config["num_hidden_layers"]
    shards: list[Tensors] = [{} for _ in range(layers + (3 if vision else 1))]
    for name, tensor in text.items():
        shard = int(name.split(".")[2]) if name.startswith("model.layers.") else layers
        shards[shard][prefix + name] = tensor.contiguous()
    for name, tensor in vision.items():
        shards[layers + (1 if name.startswith("mm_projector") else 2)][name] = tensor
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, directory / file)
        (directory / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(directory / "model.safetensors.index.json",
               {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})  # fmt: skip
    write_json(directory / "config.json", dict(sorted(config.items())))
    limits = {"max_length": text_config["max_position_embeddings"], "eos_token_id": config["eos_token_id"]}
    write_json(directory / "generation_config.json", limits)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


# --------------------------------------------------------------------------------------------------- checkpoints

# The multi-byte tokens of the tiny tokenizer: each merges from two tokens before it.
WORD_PIECES = [
    " t", "he", "in", " a", "re", "on", " the", "er", " s", "at", "en", "or", "es", "an", " w", "it", "is", "ou", "al",
    " o", " of", "ing", "ed", " c", "th", "ar", "nd", " and", "ll", "hell", "hello", " wor", "ld", " world", " b",
    " f", " h", " i", " m", " p", "st", "le", " to", "om", "ic", "ro", " be", "ve", "ch", "se", "il", "as", " g", "ly",
    "us", "12", "123",
]  # fmt: skip
HAN_PIECES = [piece for han in "中你好" for piece in (han.encode()[:2], han.encode())]
MERGES = [piece.encode() for piece in WORD_PIECES] + HAN_PIECES + ["你好".encode()]
TOKENS = [bytes([byte]) for byte in range(256)] + MERGES


def write_tiny(directory: Path) -> tuple[dict, Tensors]:
    """K2.6's layout. Returns config.json and the language model's tensors, named without their prefix."""
    generator = torch.Generator().manual_seed(0)
    config = tiny_config(len(TOKENS))
    text_config = config["text_config"]
    weights = random_weights(text_config, generator)
    # Random logits favour special tokens and half characters; quieten those so that decoding prints text.
    printable = torch.tensor([token.isascii() and token.decode().isprintable() for token in TOKENS])
    weights["lm_head.weight"][: len(TOKENS)][~printable] *= 0.25
    weights["lm_head.weight"][len(TOKENS) :] *= 0.25
    text = pack_experts(weights, text_config["quantization_config"], scale_rule="absmax/7", shape_dtype=torch.int32)
    write_checkpoint(directory, config, text, vision_tensors(config["vision_config"], generator), "language_model.")
    write_tokenizer(directory, MERGES)
    return config, text


def write_variant(directory: Path) -> tuple[dict, Tensors]:
    """K2-Thinking's layout (no prefix, no vision), compressed-tensors' own scales and weight_shape, no YaRN."""
    config = variant_config()
    weights = random_weights(config, torch.Generator().manual_seed(1))
    text = pack_experts(weights, config["quantization_config"], scale_rule="absmax/7.5", shape_dtype=torch.int64)
    assert any(
        (expert_codes(text, name.removesuffix("weight_packed")) == -8).any() for name in text if name.endswith("packed")
    )
    write_checkpoint(directory, config, text, {}, "")
    write_tokenizer(directory, [])
    return config, text


def write_drafter(directory: Path) -> None:
    """A DFlash drafter for tiny_random, in the layout of the public Kimi drafters."""
    text = tiny_config(len(TOKENS))["text_config"]
    hidden, heads, kv_heads, head_dim, inner, taps = text["hidden_size"], 16, 8, 16, 256, [0, 1, 3]
    config = {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 8,
        "bos_token_id": text["bos_token_id"],
        "dflash_config": {"mask_token_id": text["bos_token_id"] + 254, "target_layer_ids": taps},
        "dtype": "bfloat16", "eos_token_id": text["eos_token_id"], "head_dim": head_dim, "hidden_act": "silu",
        "hidden_size": hidden, "initializer_range": 0.02, "intermediate_size": inner,
        "layer_types": ["full_attention"] * 2, "max_position_embeddings": text["max_position_embeddings"],
        "model_type": "qwen3", "num_attention_heads": heads, "num_hidden_layers": 2, "num_key_value_heads": kv_heads,
        "num_target_layers": text["num_hidden_layers"], "pad_token_id": text["pad_token_id"],
        "rms_norm_eps": text["rms_norm_eps"], "rope_scaling": text["rope_scaling"], "rope_theta": text["rope_theta"],
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "vocab_size": text["vocab_size"],
    }  # fmt: skip
    named = {"fc": (hidden, len(taps) * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
            "self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        named |= {f"layers.{layer}.{key}": shape for key, shape in shapes.items()}
    generator = torch.Generator().manual_seed(2)
    weights = {}
    for name, shape in named.items():
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.2 * noise if len(shape) == 1 else noise / math.sqrt(shape[-1])
        weights[name + ".weight"] = value.bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "model.safetensors").chmod(0o644)
    write_json(directory / "config.json", config)
