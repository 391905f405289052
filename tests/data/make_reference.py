"""Write the bundled tiny checkpoint and the reference fixtures, with implementations outside this project.

    uv run --group fixtures tests/data/make_reference.py OUT              # everything, under OUT
    uv run --group fixtures tests/data/make_reference.py --bundle         # in place: kimi_jax/assets and tests/data
    uv run --group fixtures tests/data/make_reference.py OUT --selfcheck  # and prove that the fixtures can fail

The checkpoint has K2.6's layout on disk and random weights; its experts are quantised and packed by compressed-tensors.
The reference is transformers' DeepseekV3ForCausalLM in float32 on the exactly dequantised weights (code x scale).
Weights are the same bytes on every run; reference outputs can differ in their last bits from machine to machine.
"""

import argparse
import base64
import json
import math
from pathlib import Path

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from numpy_model import MISTAKES, NumpyModel
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

DATA = Path(__file__).parent
ASSETS = DATA.parents[1] / "kimi_jax" / "assets"
Tensors = dict[str, torch.Tensor]

# ------------------------------------------------------------------------------------------------- configuration

TINY = {
    "hidden_size": 128, "num_hidden_layers": 4, "first_k_dense_replace": 1, "intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "max_position_embeddings": 8192,
}  # fmt: skip
VARIANT = TINY | {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 64, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "rope_scaling": None, "bos_token_id": 60, "eos_token_id": 61, "pad_token_id": 63,
}  # fmt: skip
TINY_VISION = {
    "vt_hidden_size": 16, "vt_intermediate_size": 24, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
    "init_pos_emb_height": 8, "init_pos_emb_width": 8, "mm_hidden_size": 16, "text_hidden_size": 128,
}  # fmt: skip


def tiny_config(first_special: int) -> dict:
    """K2.6's config.json with small dimensions and special ids counted from `first_special`."""
    config = json.loads((DATA / "configs" / "kimi_k26.json").read_text())
    shift = first_special - config["bos_token_id"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
        config[key] += shift
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config["text_config"][key] = config[key]
    config["text_config"] |= TINY | {"vocab_size": first_special + RESERVED}
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
    """BF16 weights (the correction bias float32) large enough that every part of the model shows in the logits."""
    weights = {}
    for name, shape in shapes(c).items():
        draw = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.15 * draw
        elif "norm.weight" in name:
            weights[name] = (1 + 0.2 * draw).bfloat16()
        elif "embed_tokens" in name:
            weights[name] = (0.5 * draw).bfloat16()
        elif name.endswith("mlp.gate.weight"):
            weights[name] = (1.4 / math.sqrt(shape[-1]) * draw).bfloat16()
        else:
            weights[name] = (1.2 / math.sqrt(shape[-1]) * draw).bfloat16()
    return weights


def vision_tensors(v: dict, generator: torch.Generator) -> Tensors:
    """Stand-ins for the vision tower and the projector: a loader of the language model has to skip them by name."""
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
    return {name: (0.05 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in out.items()}


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
    layers = config.get("text_config", config)["num_hidden_layers"]
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
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(directory / "model.safetensors.index.json",
               {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})  # fmt: skip
    write_json(directory / "config.json", dict(sorted(config.items())))


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------- tokenizer

RESERVED = 256  # ids kept for special tokens after the ranks of tiktoken.model
# Offsets from the first special id, as in K2.6 (163584); an offset without a name is <|reserved_token_ID|>.
SPECIAL_TOKENS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>",
    20: "<|media_end|>", 21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
NOT_SPECIAL = {11, 12, 13, 14, 15, 22, 23}  # added tokens that `skip_special_tokens` keeps: tool calls and thinking
MERGES = (
    " t|he|in| a|re|on| the|er| s|at|en|or|es|an| w|it|is|ou|al| o| of|ing|ed| c|th|ar|nd| and|ll|hell|hello| wor|ld"
    "| world| b| f| h| i| m| p|st|le| to|om|ic|ro| be|ve|ch|se|il|as| g|12|123|中|你|你好|好"
)


def token_ranks(count: int = 320) -> list[bytes]:
    """256 bytes, then merges, each of which splits into two tokens before it (what byte-pair encoding needs)."""
    tokens = [bytes([byte]) for byte in range(256)]

    def add(token: bytes) -> None:
        if token in tokens:
            return
        if not any(token[:i] in tokens and token[i:] in tokens for i in range(1, len(token))):
            add(token[:-1])
        tokens.append(token)

    for merge in MERGES.split("|"):
        add(merge.encode())
    assert len(tokens) == count, len(tokens)
    return tokens


def write_tokenizer(directory: Path, tokens: list[bytes]) -> None:
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(len(tokens) + offset): {
            "content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": offset not in NOT_SPECIAL,
        }
        for offset, content in SPECIAL_TOKENS.items()
    }  # fmt: skip
    named = [SPECIAL_TOKENS[offset] for offset in (2, 3, 4, 6, 7, 9, 10, 17, 18, 19, 20, 21)]
    write_json(directory / "tokenizer_config.json", {
        "added_tokens_decoder": added, "additional_special_tokens": named, "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False, "eos_token": "[EOS]", "extra_special_tokens": {},
        "model_max_length": int(1e30), "pad_token": "[PAD]", "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    })  # fmt: skip


# ---------------------------------------------------------------------------------------------------- reference


def transformers_model(config: dict, tensors: Tensors) -> DeepseekV3ForCausalLM:
    """DeepseekV3ForCausalLM in float32 whose experts are the exact products code x scale."""
    c = config.get("text_config", config)
    ignored = ("architectures", "model_type", "dtype", "auto_map", "quantization_config")
    hf_config = DeepseekV3Config(**{key: c[key] for key in c if key not in ignored})
    hf_config._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(hf_config).float().eval()

    def dequantised(base: str) -> torch.Tensor:
        scale = tensors[base + "weight_scale"].float().repeat_interleave(32, -1)
        return expert_codes(tensors, base).float() * scale

    state = {name: tensor.float() for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(c["first_k_dense_replace"], c["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.experts."
        experts = range(c["n_routed_experts"])
        down, gate, up = ([dequantised(f"{name}{e}.{p}_proj.") for e in experts] for p in ("down", "gate", "up"))
        state[name + "down_proj"] = torch.stack(down)
        state[name + "gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
def run(model: DeepseekV3ForCausalLM, ids: torch.Tensor) -> Tensors:
    """One forward over `ids` [sequences, tokens] with everything the tests compare; see README.md for the keys."""
    shape, seen, hooks = ids.shape, {}, []

    def record(layer: int, module: torch.nn.Module, what: str) -> None:
        hooks.append(module.register_forward_hook(lambda m, args, out: seen.__setitem__(f"{what}.{layer}", out)))

    for i, layer in enumerate(model.model.layers):
        record(i, layer, "hidden")
        if hasattr(layer.mlp, "gate"):
            record(i, layer.mlp.gate, "router")
    output = model(ids, use_cache=True)
    for hook in hooks:
        hook.remove()

    out = {"embeddings": model.model.embed_tokens(ids), "logits": output.logits}
    for i, (layer, cache) in enumerate(zip(model.model.layers, output.past_key_values.layers, strict=True)):
        out[f"hidden.{i}"] = seen[f"hidden.{i}"]
        out[f"cache_latent.{i}"], out[f"cache_rope.{i}"] = cache.keys[:, 0], cache.values[:, 0]
        if hasattr(layer.mlp, "gate"):
            logits, weights, picked = seen[f"router.{i}"]
            picked, order = picked.sort(-1)
            out[f"router_logits.{i}"] = logits.unflatten(0, shape)
            out[f"topk_ids.{i}"] = picked.int().unflatten(0, shape)
            out[f"topk_weights.{i}"] = weights.gather(-1, order).unflatten(0, shape)
    return out


def router_choice(model: DeepseekV3ForCausalLM, out: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Per MoE layer and token: the lead of the last expert picked over the next, and whether the bias decided."""
    margins, decided = [], []
    for i, layer in enumerate(model.model.layers):
        if f"router_logits.{i}" in out:
            score, k = out[f"router_logits.{i}"].sigmoid(), layer.mlp.gate.top_k
            biased = score + layer.mlp.gate.e_score_correction_bias
            best = biased.topk(k + 1).values
            margins.append(best[..., k - 1] - best[..., k])
            decided.append((score.topk(k).indices.sort(-1).values != biased.topk(k).indices.sort(-1).values).any(-1))
    return torch.stack(margins), torch.stack(decided)


def draw(model: DeepseekV3ForCausalLM, shape: tuple[int, int], vocabulary: int, generator: torch.Generator):
    """Random ids and their run, drawn again until no router choice is so close that float32 rounding could turn it."""
    while True:
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        out = run(model, ids)
        if router_choice(model, out)[0].min() > 1e-4:
            return ids, out


def lead(logits: torch.Tensor) -> torch.Tensor:
    """How far the largest logit is above the second."""
    best = logits.topk(2).values
    return best[..., 0] - best[..., 1]


def robust_prompt(model: DeepseekV3ForCausalLM, vocabulary: int, length: int) -> torch.Tensor:
    """[1, length] ids on which rounding decides nothing: at every position wide router margins and a wide top-1 lead.

    Built token by token from all candidates, taking the one whose smaller ratio to (0.05, 0.5) is largest.
    """
    ids = torch.empty((1, 0), dtype=torch.long)
    for _ in range(length):
        batch = torch.cat([ids.expand(vocabulary, -1), torch.arange(vocabulary)[:, None]], 1)
        out = run(model, batch)
        margin = router_choice(model, out)[0][..., -1].amin(0)
        score = torch.minimum(margin / 0.05, lead(out["logits"][:, -1]) / 0.5)
        ids = batch[score.argmax()][None]
        assert score.max() >= 1, "no robust continuation; change the seed"
    return ids


def greedy_continuation(model: DeepseekV3ForCausalLM, vocabulary: int, generator: torch.Generator):
    """[3, 8 + 24] prompts with their greedy continuation, free of special tokens and of ties; and its smallest lead."""
    while True:
        prompts = torch.randint(0, vocabulary, (3, 8), generator=generator)
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False,
                             eos_token_id=None, pad_token_id=0)  # fmt: skip
        out = run(model, ids)
        smallest = lead(out["logits"][:, 7:-1]).min().item()
        if smallest > 5e-3 and router_choice(model, out)[0].min() > 1e-4 and ids.max() < vocabulary:
            return ids, smallest


def tiny_reference(model: DeepseekV3ForCausalLM, vocabulary: int, generator: torch.Generator) -> tuple[Tensors, dict]:
    """The contents of reference.safetensors and the facts that its README and --selfcheck report."""
    ids, out = draw(model, (3, 24), vocabulary, generator)
    out["input_ids"] = ids
    margins, decided = router_choice(model, out)
    facts = {"choices that the bias decides": decided.float().mean().item(), "router margin": margins.min().item()}

    long_ids, long = draw(model, (1, 200), vocabulary, generator)
    last = model.config.num_hidden_layers - 1
    for key in ("logits", f"hidden.{last}", f"cache_latent.{last}", f"cache_rope.{last}"):
        out["long_" + key] = long[key]
    out["long_input_ids"] = long_ids
    facts["router margin, 200 tokens"] = router_choice(model, long)[0].min().item()

    robust_ids = robust_prompt(model, vocabulary, 24)
    robust = run(model, robust_ids)
    out |= {"robust_input_ids": robust_ids, "robust_logits": robust["logits"]}
    facts["router margin, robust"] = router_choice(model, robust)[0].min().item()
    facts["top-1 lead, robust"] = lead(robust["logits"]).min().item()

    out["greedy_ids"], facts["top-1 lead, greedy"] = greedy_continuation(model, vocabulary, generator)

    half = transformers_model_bfloat16(model)
    rounded = half(robust_ids).logits.float()
    assert torch.equal(rounded.argmax(-1), robust["logits"].argmax(-1)), "bfloat16 moves the robust prompt's argmax"
    facts["bfloat16 difference, robust"] = (rounded - robust["logits"]).abs().max().item()
    return {k: (v.int() if v.dtype == torch.int64 else v).contiguous() for k, v in out.items()}, facts


@torch.no_grad()
def transformers_model_bfloat16(model: DeepseekV3ForCausalLM) -> DeepseekV3ForCausalLM:
    """The same weights rounded to bfloat16 (only the dequantised experts change); the correction bias stays float32."""
    half = DeepseekV3ForCausalLM(model.config).to(torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            half.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = buffer
    half.load_state_dict(model.state_dict(), strict=True)
    return half


# ---------------------------------------------------------------------------------------------------- selfcheck

TOLERANCE = 1e-4  # what the tests allow between the project's float32 logits and the reference


def selfcheck(tiny: Path, fixtures: Path) -> None:
    """Assert that the reference is right and that every known mistake would be seen; print both as tables."""
    reference = load_file(fixtures / "reference.safetensors")
    variant = load_file(fixtures / "variant_ct" / "reference.safetensors")

    def difference(directory: Path, ids: torch.Tensor, logits: torch.Tensor, **options) -> float:
        model = NumpyModel(directory, **options)
        return max(
            np.abs(model.logits(row) - want).max() for row, want in zip(ids.numpy(), logits.numpy(), strict=True)
        )

    print(f"logits: standard deviation {reference['logits'].std():.2f}, largest {reference['logits'].abs().max():.2f}")
    for title, directory, tensors, prefix in (
        ("tiny_random", tiny, reference, ""), ("tiny_random, 200 tokens", tiny, reference, "long_"),
        ("tiny_random, robust", tiny, reference, "robust_"), ("variant_ct", fixtures / "variant_ct", variant, ""),
    ):  # fmt: skip
        for absorbed in (False, True):
            error = difference(directory, tensors[prefix + "input_ids"], tensors[prefix + "logits"], absorbed=absorbed)
            print(f"{error:10.2e}  {title}, NumPy float64, {'absorbed' if absorbed else 'expanded'}")
            assert error < TOLERANCE / 2
    ids, logits = reference["input_ids"], reference["logits"]
    for title, options in (("latent norms with rms_norm_eps", {"latent_norm_eps": 1e-5}),
                           ("experts dequantised to bfloat16", {"bfloat16_weights": True})):  # fmt: skip
        print(f"{difference(tiny, ids, logits, **options):10.2e}  legal: {title}")
    for mistake, meaning in MISTAKES.items():
        error = difference(tiny, ids, logits, mistake=mistake)
        print(f"{error:10.2e}  mistake: {meaning}")
        assert error > 100 * TOLERANCE, mistake


# --------------------------------------------------------------------------------------------------------- main


def make_tiny(directory: Path, fixtures: Path) -> dict:
    generator = torch.Generator().manual_seed(0)
    tokens = token_ranks()
    config = tiny_config(len(tokens))
    text_config = config["text_config"]
    weights = random_weights(text_config, generator)
    # Random logits favour special tokens and half characters; quieten those so that decoding prints text.
    printable = torch.tensor([token.decode(errors="replace").isprintable() and token.isascii() for token in tokens])
    weights["lm_head.weight"][: len(tokens)][~printable] *= 0.25
    weights["lm_head.weight"][len(tokens) :] *= 0.25
    text = pack_experts(weights, text_config["quantization_config"], scale_rule="absmax/7", shape_dtype=torch.int32)
    vision = vision_tensors(config["vision_config"], generator)
    write_checkpoint(directory, config, text, vision, "language_model.")
    write_json(directory / "generation_config.json",
               {"max_length": text_config["max_position_embeddings"], "eos_token_id": config["eos_token_id"]})  # fmt: skip
    write_tokenizer(directory, tokens)
    reference, facts = tiny_reference(transformers_model(config, text), len(tokens), generator)
    save_file(reference, fixtures / "reference.safetensors")
    return facts


def make_variant(directory: Path) -> dict:
    generator = torch.Generator().manual_seed(1)
    config = variant_config()
    text = pack_experts(random_weights(config, generator), config["quantization_config"],
                        scale_rule="absmax/7.5", shape_dtype=torch.int64)  # fmt: skip
    write_checkpoint(directory, config, text, {}, "")
    model = transformers_model(config, text)
    ids, out = draw(model, (2, 24), config["vocab_size"], generator)
    save_file({"input_ids": ids.int(), "logits": out["logits"]}, directory / "reference.safetensors")
    codes = torch.cat([expert_codes(text, name.removesuffix("weight_packed")).flatten()
                       for name in text if name.endswith("weight_packed")])  # fmt: skip
    assert (codes == -8).any(), "the variant is there for its -8 codes"
    return {"-8 codes": (codes == -8).float().mean().item(),
            "router margin": router_choice(model, out)[0].min().item()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="directory to write to")
    parser.add_argument("--bundle", action="store_true", help="write into the checkout instead of OUT")
    parser.add_argument("--selfcheck", action="store_true", help="compare with the NumPy model, and try each mistake")
    args = parser.parse_args()
    if (args.out is None) == (not args.bundle):
        parser.error("give OUT or --bundle")
    assets, fixtures = (ASSETS, DATA) if args.bundle else (args.out, args.out)
    fixtures.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    for title, facts in (("tiny_random", make_tiny(assets / "tiny_random", fixtures)),
                         ("variant_ct", make_variant(fixtures / "variant_ct"))):  # fmt: skip
        print(title, *(f"  {key}: {value:.4g}" for key, value in facts.items()), sep="\n")
    if args.selfcheck:
        selfcheck(assets / "tiny_random", fixtures)


if __name__ == "__main__":
    main()
