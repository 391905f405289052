"""Write the bundled tiny checkpoints and the reference fixtures, with implementations outside this project.

    uv run --group fixtures tests/data/make_reference.py OUT              # everything, under OUT
    uv run --group fixtures tests/data/make_reference.py --bundle         # in place, in tests/data
    uv run --group fixtures tests/data/make_reference.py OUT --selfcheck  # and prove that the fixtures can fail

The checkpoints have K2.6's layout on disk and random weights; their experts are quantised and packed by
compressed-tensors. The reference is transformers' DeepseekV3ForCausalLM in float32 on the exactly dequantised weights
(code x scale). Only the tokenizer files come from this project. Checkpoints are the same bytes on every run; reference
outputs can differ in their last bits from machine to machine.
"""

import argparse
from pathlib import Path

import torch
import transformers
from numpy_model import selfcheck
from safetensors.torch import save_file
from tiny_checkpoint import TOKENS, Tensors, expert_codes, write_drafter, write_tiny, write_variant
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

DATA = Path(__file__).parent


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


def router_margins(model: DeepseekV3ForCausalLM, out: Tensors) -> torch.Tensor:
    """[moe layers, sequences, tokens] lead of the last expert picked over the next one."""
    k = model.config.num_experts_per_tok
    best = torch.stack([scores.topk(k + 1).values for scores in biased_scores(model, out)])
    return best[..., k - 1] - best[..., k]


def share_of_other_picks(model: DeepseekV3ForCausalLM, out: Tensors, change) -> float:
    """Share of routing decisions that would be different if the correction bias b were change(b)."""
    k = model.config.num_experts_per_tok
    picks = [
        torch.stack([scores.topk(k).indices.sort(-1).values for scores in biased_scores(model, out, bias)])
        for bias in (lambda b: b, change)
    ]
    return (picks[0] != picks[1]).any(-1).float().mean().item()


def biased_scores(model: DeepseekV3ForCausalLM, out: Tensors, change=lambda b: b) -> list[torch.Tensor]:
    """Per MoE layer, [sequences, tokens, experts] sigmoid scores plus correction bias: what selection sorts by."""
    layers = [(i, layer.mlp.gate) for i, layer in enumerate(model.model.layers) if f"router_logits.{i}" in out]
    return [out[f"router_logits.{i}"].sigmoid() + change(gate.e_score_correction_bias) for i, gate in layers]


def draw(model: DeepseekV3ForCausalLM, shape: tuple[int, int], vocabulary: int, generator: torch.Generator):
    """Random ids and their run.

    Drawn again until no routing decision is so close that float32 rounding could turn it, while a correction bias
    rounded to bfloat16 does turn one: selection has to use the float32 bits.
    """
    while True:
        ids = torch.randint(0, vocabulary, shape, generator=generator)
        out = run(model, ids)
        rounded = share_of_other_picks(model, out, lambda b: b.bfloat16().float())
        if router_margins(model, out).min() > 1e-4 and rounded > 0:
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
        margin = router_margins(model, out)[..., -1].amin(0)
        score = torch.minimum(margin / 0.05, lead(out["logits"][:, -1]) / 0.5)
        score[ids[0]] = 0  # no token twice
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
        if smallest > 5e-3 and router_margins(model, out).min() > 1e-4 and ids.max() < vocabulary:
            return ids, smallest


def tiny_reference(model: DeepseekV3ForCausalLM, plain: int, generator: torch.Generator) -> tuple[Tensors, dict]:
    """The contents of reference.safetensors, and how far from a tie they are; ids below `plain` are not special."""
    vocabulary = model.config.vocab_size
    ids, out = draw(model, (3, 24), vocabulary, generator)
    out["input_ids"] = ids
    facts = {
        "routing decided by the bias": share_of_other_picks(model, out, torch.zeros_like),
        "router margin": router_margins(model, out).min().item(),
    }

    long_ids, long = draw(model, (1, 200), vocabulary, generator)
    last = model.config.num_hidden_layers - 1
    for key in ("logits", f"hidden.{last}", f"cache_latent.{last}", f"cache_rope.{last}"):
        out["long_" + key] = long[key]
    out["long_input_ids"] = long_ids
    facts["router margin, 200 tokens"] = router_margins(model, long).min().item()

    robust_ids = robust_prompt(model, plain, 24)
    robust = run(model, robust_ids)
    out |= {"robust_input_ids": robust_ids, "robust_logits": robust["logits"]}
    facts["router margin, robust"] = router_margins(model, robust).min().item()
    facts["top-1 lead, robust"] = lead(robust["logits"]).min().item()

    out["greedy_ids"], facts["top-1 lead, greedy"] = greedy_continuation(model, plain, generator)

    half = transformers_model_bfloat16(model)
    rounded = run(half, robust_ids)["logits"].float()
    assert torch.equal(rounded.argmax(-1), robust["logits"].argmax(-1)), "bfloat16 moves the robust prompt's argmax"
    facts["bfloat16 difference, robust"] = (rounded - robust["logits"]).abs().max().item()
    return out, facts


@torch.no_grad()
def transformers_model_bfloat16(model: DeepseekV3ForCausalLM) -> DeepseekV3ForCausalLM:
    """The same weights rounded to bfloat16 (only the dequantised experts change); the correction bias stays float32."""
    half = DeepseekV3ForCausalLM(model.config).to(torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            half.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = buffer
    half.load_state_dict(model.state_dict(), strict=True)
    return half


def save(tensors: Tensors, path: Path) -> None:
    """Write a fixture; ids as int32."""
    save_file({k: (v.int() if v.dtype == torch.int64 else v).contiguous() for k, v in tensors.items()}, path)
    path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="directory to write to")
    parser.add_argument("--bundle", action="store_true", help="write into the checkout instead of OUT")
    parser.add_argument("--selfcheck", action="store_true", help="compare with the NumPy model, and try each mistake")
    args = parser.parse_args()
    if (args.out is None) == (not args.bundle):
        parser.error("give OUT or --bundle")
    fixtures = DATA if args.bundle else args.out
    fixtures.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()

    tiny = fixtures / "tiny_random"
    model = transformers_model(*write_tiny(tiny))
    reference, facts = tiny_reference(model, len(TOKENS), torch.Generator().manual_seed(10))
    save(reference, fixtures / "reference.safetensors")
    print("tiny_random", *(f"  {key}: {value:.4g}" for key, value in facts.items()), sep="\n")

    config, tensors = write_variant(fixtures / "variant_ct")
    model = transformers_model(config, tensors)
    ids, out = draw(model, (2, 24), config["vocab_size"], torch.Generator().manual_seed(11))
    save({"input_ids": ids, "logits": out["logits"]}, fixtures / "variant_ct" / "reference.safetensors")

    write_drafter(fixtures / "tiny_random_drafter")
    if args.selfcheck:
        selfcheck(tiny, fixtures)


if __name__ == "__main__":
    main()
