"""Write config_variants.json: what transformers makes of changes to tiny_random's configuration.

    uv run --group fixtures tests/data/make_config_variants.py

Each case has the changes to text_config (null removes a field), and transformers' inverse frequencies, factor on cos
and sin, and softmax scale; some also logits [8 tokens, first 16 of the vocabulary] in float32.
"""

import json
from pathlib import Path

import torch
import transformers
from make_reference import transformers_model
from safetensors.torch import load_file

DATA = Path(__file__).parent
TINY = DATA / "tiny_random"
IDS = [3, 141, 59, 26, 53, 58, 97, 93]
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
BASE = {**YARN, **MSCALES, "beta_fast": 32.0, "beta_slow": 1.0}
V5 = {**YARN, **MSCALES, "rope_type": "yarn"}
WITH_LOGITS = {
    "rope_interleave false": {"rope_interleave": False},
    "attention_factor, truncate false, rope_theta inside": {
        "rope_scaling": None,
        "rope_parameters": {**V5, "attention_factor": 1.2, "truncate": False, "rope_theta": 10000.0},
    },
}
CASES = WITH_LOGITS | {
    "as it is": {},
    "attention_factor": {"rope_scaling": {**BASE, "attention_factor": 0.7}},
    "truncate false": {"rope_scaling": {**BASE, "truncate": False, "beta_fast": 24.0}},
    "rope_theta inside": {"rope_scaling": None, "rope_parameters": {**V5, "rope_theta": 1234.5}},
    "rope_scaling before rope_parameters": {"rope_parameters": {**V5, "rope_theta": 99.0, "factor": 2.0}},
    "nothing but what is needed": {"rope_scaling": YARN},
    "null fields": {"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": None, "attention_factor": None}},
    "mscale alone": {"rope_scaling": {**YARN, "mscale": 2.0}},
    "mscale_all_dim alone": {"rope_scaling": {**YARN, "mscale_all_dim": 0.5}},
    "both mscales": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5}},
    "mscales 0": {"rope_scaling": {**YARN, "mscale": 0, "mscale_all_dim": 0}},
    "factor 1": {"rope_scaling": {**BASE, "factor": 1.0}},
    "as wide as a turn": {"rope_scaling": {**BASE, "original_max_position_embeddings": 16}},
    "shorter than a turn": {"rope_scaling": {**BASE, "original_max_position_embeddings": 4}},
    "betas equal, truncate false": {"rope_scaling": {**BASE, "beta_fast": 1.0, "truncate": False}},
    "no scaling": {"rope_scaling": None},
    "default type": {"rope_scaling": {"type": "default"}},
    "default type with its theta": {"rope_scaling": None, "rope_parameters": {"rope_theta": 777.0}},
}


@torch.no_grad()
def main() -> None:
    transformers.logging.set_verbosity_error()
    config = json.loads((TINY / "config.json").read_text())["text_config"]
    tensors = {}
    for file in sorted(TINY.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.startswith("language_model."):
                tensors[name.removeprefix("language_model.")] = tensor
    result = {}
    for name, changes in CASES.items():
        changed = json.loads(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))
        model = transformers_model(changed, tensors)
        rotary, attention = model.model.rotary_emb, model.model.layers[0].self_attn
        result[name] = {
            "changes": changes,
            "inv_freq": rotary.inv_freq.tolist(),
            "amplitude": rotary.attention_scaling,
            "scale": attention.scaling,
        }
        if name in WITH_LOGITS:
            result[name]["ids"] = IDS
            result[name]["logits"] = model(torch.tensor([IDS])).logits[0, :, :16].tolist()
    cases = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in result.items())
    (DATA / "config_variants.json").write_text(f"{{\n{cases}\n}}\n")


if __name__ == "__main__":
    main()
