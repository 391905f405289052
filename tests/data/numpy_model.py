"""The model once more in plain NumPy, float64: an oracle that shares no code with the project or with transformers.

`selfcheck` uses it twice: to confirm everything in the stored reference, and to show that each known mistake moves the
logits far beyond the tests' tolerance (a fixture that cannot tell right from wrong proves nothing).

    uv run tests/data/numpy_model.py        # both tables, for the fixtures of this checkout
"""

import json
import math
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # what the tests allow between the project's float32 values and the reference
LATENT_NORM_EPS = 1e-6  # q_a_layernorm and kv_a_layernorm keep RMSNorm's default, whatever rms_norm_eps says
GROUP = 32

# Each is one line in the code below, and each has been made by some engine or loader.
MISTAKES = {
    "half_split_rope": "rotate (i, i+d/2) although the checkpoint stores interleaved pairs",
    "rope_before_nope": "read the rope part of a query head before its nope part",
    "rope_key_normalised": "normalise latent and rope key together",
    "no_mscale": "forget mscale² in the attention scale",
    "mscale_on_cos_sin": "apply mscale to cos and sin although mscale / mscale_all_dim is 1",
    "no_yarn_ramp": "use the unscaled rope frequencies",
    "value_before_key": "read kv_b_proj's value rows before its key rows",
    "not_causal": "forget the causal mask",
    "bias_ignored": "select experts without the correction bias",
    "bias_bfloat16": "hold the correction bias in bfloat16",
    "bias_in_weights": "let the correction bias into the expert weights",
    "softmax_scores": "score experts by softmax instead of sigmoid",
    "no_topk_norm": "forget to normalise the selected weights",
    "no_routed_scaling": "forget routed_scaling_factor",
    "shared_scaled": "multiply the shared expert by routed_scaling_factor",
    "gate_up_swapped": "apply silu to up instead of gate",
    "nibbles_reversed": "read the nibbles of a word from high to low",
    "offset_7": "subtract 7 instead of 8 from the stored codes",
    "scales_shifted": "use the scale of the neighbouring group",
    "eps_ignored": "use 1e-6 in every norm, whatever rms_norm_eps says",
    "no_final_norm": "forget the norm before lm_head",
}


def read_safetensors(*paths: Path) -> dict[str, np.ndarray]:
    """Every tensor of the files; BF16 widened to float32."""
    tensors = {}
    for path in paths:
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name == "__metadata__":
                continue
            begin, end = (start + offset for offset in entry["data_offsets"])
            kind = {"BF16": "<u2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}[entry["dtype"]]
            data = np.frombuffer(raw[begin:end], kind).reshape(entry["shape"])
            tensors[name] = (data.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else data
    return tensors


class NumpyModel:
    """A K2-family checkpoint, computed naively and a sequence at a time.

    `absorbed` evaluates attention in the latent space (algebraically the same); `mistake` is a key of MISTAKES;
    `latent_norm_eps` and `bfloat16_experts` are deviations that some engines make on purpose. `seen` holds what the
    last call computed on the way, under the names that README.md gives.
    """

    def __init__(
        self, directory: Path, *, absorbed=False, mistake="", latent_norm_eps=LATENT_NORM_EPS, bfloat16_experts=False
    ):
        assert not mistake or mistake in MISTAKES, mistake
        config = json.loads((directory / "config.json").read_text())
        self.config = config.get("text_config", config)
        tensors = read_safetensors(*sorted(directory.glob("model-*.safetensors")))
        self.tensors = {name.removeprefix("language_model."): value for name, value in tensors.items()}
        self.absorbed, self.mistake, self.latent_norm_eps = absorbed, mistake, latent_norm_eps
        self.bfloat16_experts = bfloat16_experts
        self.weights: dict[str, np.ndarray] = {}
        self.seen: dict[str, np.ndarray] = {}

    def weight(self, name: str) -> np.ndarray:
        if name not in self.weights:
            plain = self.tensors.get(name + ".weight")
            self.weights[name] = self.dequantised(name) if plain is None else plain.astype(np.float64)
        return self.weights[name]

    def dequantised(self, name: str) -> np.ndarray:
        words = self.tensors[name + ".weight_packed"].view(np.uint32)
        scale = self.tensors[name + ".weight_scale"].astype(np.float64)
        shifts = range(28, -1, -4) if self.mistake == "nibbles_reversed" else range(0, 32, 4)
        codes = np.stack([(words >> np.uint32(s)) & 15 for s in shifts], -1).reshape(len(words), -1)
        codes = codes[:, : self.tensors[name + ".weight_shape"][1]].astype(np.float64)
        codes -= 7 if self.mistake == "offset_7" else 8
        if self.mistake == "scales_shifted":
            scale = np.roll(scale, 1, axis=1)
        weight = codes * np.repeat(scale, GROUP, axis=1)
        return round_to_bfloat16(weight) if self.bfloat16_experts else weight

    def logits(self, ids) -> np.ndarray:
        """[tokens] ids of one sequence to [tokens, vocabulary]."""
        x = self.seen["embeddings"] = self.weight("model.embed_tokens")[np.asarray(ids)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            x = x + self.attention(layer, name + "self_attn.", self.norm(x, name + "input_layernorm"))
            h = self.norm(x, name + "post_attention_layernorm")
            dense = layer < self.config["first_k_dense_replace"]
            x = x + (self.mlp(name + "mlp.", h) if dense else self.moe(layer, name + "mlp.", h))
            self.seen[f"hidden.{layer}"] = x
        x = x if self.mistake == "no_final_norm" else self.norm(x, "model.norm")
        self.seen["logits"] = x @ self.weight("lm_head").T
        return self.seen["logits"]

    def norm(self, x, name, eps=None):
        if eps is None:
            eps = LATENT_NORM_EPS if self.mistake == "eps_ignored" else self.config["rms_norm_eps"]
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * self.weight(name)

    def attention(self, layer, name, x):
        c, mistake, tokens = self.config, self.mistake, len(x)
        heads, nope, rope, value = (
            c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        q = self.norm(x @ self.weight(name + "q_a_proj").T, name + "q_a_layernorm", self.latent_norm_eps)
        q = (q @ self.weight(name + "q_b_proj").T).reshape(tokens, heads, nope + rope).transpose(1, 0, 2)
        q_nope, q_rope = (
            (q[..., rope:], q[..., :rope]) if mistake == "rope_before_nope" else (q[..., :nope], q[..., nope:])
        )
        compressed = x @ self.weight(name + "kv_a_proj_with_mqa").T
        latent, k_rope = compressed[:, : c["kv_lora_rank"]], compressed[:, c["kv_lora_rank"] :]
        if mistake == "rope_key_normalised":
            k_rope = k_rope / np.sqrt(np.mean(compressed**2, -1, keepdims=True) + self.latent_norm_eps)
        latent = self.norm(latent, name + "kv_a_layernorm", self.latent_norm_eps)
        q_rope, k_rope = self.rotate(q_rope), self.rotate(k_rope)
        self.seen[f"cache_latent.{layer}"], self.seen[f"cache_rope.{layer}"] = latent, k_rope

        w = self.weight(name + "kv_b_proj").reshape(heads, nope + value, -1)
        w_key, w_value = (w[:, value:], w[:, :value]) if mistake == "value_before_key" else (w[:, :nope], w[:, nope:])
        if self.absorbed:
            scores = np.einsum("htn,hnk,sk->hts", q_nope, w_key, latent, optimize=True)
        else:
            scores = np.einsum("htn,hsn->hts", q_nope, np.einsum("sk,hnk->hsn", latent, w_key))
        scores = (scores + np.einsum("htr,sr->hts", q_rope, k_rope)) * self.attention_scale()
        if mistake != "not_causal":
            scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        if self.absorbed:
            out = np.einsum("htk,hvk->thv", np.einsum("hts,sk->htk", p, latent), w_value)
        else:
            out = np.einsum("hts,hsv->thv", p, np.einsum("sk,hvk->hsv", latent, w_value))
        return out.reshape(tokens, -1) @ self.weight(name + "o_proj").T

    def attention_scale(self):
        c = self.config
        yarn = c["rope_scaling"] and self.mistake != "no_mscale"
        return (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5 * (
            self.mscale("mscale_all_dim") ** 2 if yarn else 1
        )

    def mscale(self, key):
        scaling = self.config["rope_scaling"]
        return 0.1 * scaling[key] * math.log(scaling["factor"]) + 1

    def rotate(self, x):
        """Rotate the rows of `x` [..., tokens, rope] by their positions 0, 1, ...; pairs leave de-interleaved."""
        c, scaling = self.config, self.config["rope_scaling"]
        dim, base = c["qk_rope_head_dim"], c["rope_theta"]
        inverse = base ** (-np.arange(0, dim, 2) / dim)
        amplitude = 1.0
        if scaling:
            low, high = (
                dim
                * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi))
                / (2 * math.log(base))
                for rotations in (scaling["beta_fast"], scaling["beta_slow"])
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
            if self.mistake != "no_yarn_ramp":
                inverse = inverse * (1 - ramp) + inverse / scaling["factor"] * ramp
            amplitude = self.mscale("mscale") / self.mscale("mscale_all_dim")
            if self.mistake == "mscale_on_cos_sin":
                amplitude = self.mscale("mscale")
        angle = np.arange(x.shape[-2])[:, None] * inverse
        cos, sin = np.cos(angle) * amplitude, np.sin(angle) * amplitude
        if self.mistake == "half_split_rope":
            a, b = x[..., : dim // 2], x[..., dim // 2 :]
        else:
            a, b = x[..., 0::2], x[..., 1::2]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def mlp(self, name, x):
        gate, up = x @ self.weight(name + "gate_proj").T, x @ self.weight(name + "up_proj").T
        if self.mistake == "gate_up_swapped":
            gate, up = up, gate
        return (gate / (1 + np.exp(-gate)) * up) @ self.weight(name + "down_proj").T

    def moe(self, layer, name, x):
        c, mistake = self.config, self.mistake
        router = x @ self.weight(name + "gate").T
        if mistake == "softmax_scores":
            scores = np.exp(router - router.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-router))
        bias = self.tensors[name + "gate.e_score_correction_bias"]
        biased = scores + (round_to_bfloat16(bias) if mistake == "bias_bfloat16" else bias)
        choice = scores if mistake == "bias_ignored" else biased
        picked = np.sort(np.argsort(-choice, axis=-1, kind="stable")[:, : c["num_experts_per_tok"]])
        weights = np.take_along_axis(biased if mistake == "bias_in_weights" else scores, picked, -1)
        if mistake != "no_topk_norm":
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        if mistake != "no_routed_scaling":
            weights = weights * c["routed_scaling_factor"]
        self.seen |= {f"router_logits.{layer}": router, f"topk_ids.{layer}": picked, f"topk_weights.{layer}": weights}
        out = self.mlp(name + "shared_experts.", x)
        if mistake == "shared_scaled":
            out = out * c["routed_scaling_factor"]
        for expert in range(c["n_routed_experts"]):
            token, slot = np.nonzero(picked == expert)
            if len(token):
                out[token] += weights[token, slot, None] * self.mlp(f"{name}experts.{expert}.", x[token])
        return out


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even at 8 significant bits."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


def reference_errors(model: NumpyModel, reference: dict[str, np.ndarray], prefix: str = "") -> dict[str, float]:
    """The largest difference for everything that `reference` stores about the sequences `prefix`input_ids."""
    errors: dict[str, float] = {}
    for row, ids in enumerate(reference[prefix + "input_ids"]):
        model.logits(ids)
        for key, value in model.seen.items():
            if prefix + key in reference:
                errors[key] = max(errors.get(key, 0.0), np.abs(value - reference[prefix + key][row]).max())
    return errors


def selfcheck(tiny: Path, fixtures: Path) -> None:
    """Assert that the reference is right and that every known mistake would be seen; print both as tables."""
    variant = fixtures / "variant_ct"
    reference = read_safetensors(fixtures / "reference.safetensors")
    variant_reference = read_safetensors(variant / "reference.safetensors")
    print(
        f"logits: standard deviation {reference['logits'].std():.2f}, largest {np.abs(reference['logits']).max():.2f}"
    )
    for title, directory, tensors, prefix in (
        ("tiny_random", tiny, reference, ""),
        ("tiny_random, 200 tokens", tiny, reference, "long_"),
        ("tiny_random, robust prompt", tiny, reference, "robust_"),
        ("variant_ct", variant, variant_reference, ""),
    ):
        for absorbed in (False, True):
            errors = reference_errors(NumpyModel(directory, absorbed=absorbed), tensors, prefix)
            worst = max(errors, key=lambda key: errors[key])
            form = "absorbed" if absorbed else "expanded"
            print(f"{errors['logits']:10.2e}  {title}, {form} (largest of {len(errors)}: {errors[worst]:.2e}, {worst})")
            assert errors[worst] < TOLERANCE / 2
    for title, options in (
        ("deviation: latent norms with rms_norm_eps", {"latent_norm_eps": 1e-5}),
        ("deviation: experts dequantised to bfloat16", {"bfloat16_experts": True}),
        *((f"mistake: {meaning}", {"mistake": mistake}) for mistake, meaning in MISTAKES.items()),
    ):
        error = reference_errors(NumpyModel(tiny, **options), reference)["logits"]
        print(f"{error:10.2e}  {title}")
        assert "mistake" not in options or error > 100 * TOLERANCE, title


if __name__ == "__main__":
    selfcheck(HERE / "tiny_random", HERE)
