"""Write vision_reference.safetensors: what transformers' Kimi K2.5 model sees in images, with tiny_random's weights.

    uv run --group fixtures tests/data/make_vision.py

Run make_reference.py first: the weights are read from tiny_random, in the checkpoint's own names, and transformers
renames and permutes them itself.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Kimi_K25ForConditionalGeneration
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config

DATA = Path(__file__).parent
GRIDS = [(1, 2, 2), (1, 4, 6), (1, 8, 8), (1, 22, 2), (1, 16, 18), (2, 4, 8), (3, 6, 4), (4, 10, 6)]
"""Frames, rows and columns of patches: smaller and larger than the table of positions, of its size, and chunks of a
video."""
PROMPT_GRIDS = [(1, 4, 6), (1, 2, 8)]
"""Of the images in the prompt whose logits are kept."""
WIDE = (7300, 6)
"""Width and height of an image that has to be resized."""


def tiny_tensors() -> dict[str, torch.Tensor]:
    """All tensors of tiny_random."""
    tensors = {}
    for file in sorted((DATA / "tiny_random").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every routed expert's weight as the exact product code x scale, in float32."""
    out = {name: tensor.float() for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for name, packed in tensors.items():
        if not name.endswith("weight_packed"):
            continue
        base = name.removesuffix("weight_packed")
        nibbles = (packed[..., None].long() >> (4 * torch.arange(8))) & 15
        codes = nibbles.flatten(-2).float() - 8
        out[base + "weight"] = codes * tensors[base + "weight_scale"].float().repeat_interleave(32, -1)
    return out


def reference_model() -> tuple[Kimi_K25ForConditionalGeneration, dict]:
    """The whole model in float32, loaded by transformers from a checkpoint in the original names."""
    raw = json.loads((DATA / "tiny_random" / "config.json").read_text())
    vision = raw["vision_config"]
    text = {key: value for key, value in raw["text_config"].items() if key not in ("quantization_config", "auto_map")}
    config = Kimi_K25Config(
        text_config=text | {"model_type": "deepseek_v3"},
        vision_config={
            "hidden_size": vision["vt_hidden_size"], "num_hidden_layers": vision["vt_num_hidden_layers"],
            "num_attention_heads": vision["vt_num_attention_heads"],
            "intermediate_size": vision["vt_intermediate_size"],
            "pos_emb_height": vision["init_pos_emb_height"], "pos_emb_width": vision["init_pos_emb_width"],
        },
        projection_hidden_size=vision["mm_hidden_size"], image_token_id=raw["media_placeholder_token_id"],
        video_token_id=text["vocab_size"], tie_word_embeddings=False,
    )  # fmt: skip
    config.architectures = ["Kimi_K25ForConditionalGeneration"]
    with tempfile.TemporaryDirectory() as folder:
        tensors = {name: tensor.contiguous() for name, tensor in dequantised(tiny_tensors()).items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        model, info = Kimi_K25ForConditionalGeneration.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
        )
    wrong = {name: info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(name)}
    assert not wrong, wrong
    return model.eval(), raw


def patches_of(grids: list[tuple[int, int, int]], rng: np.random.Generator) -> np.ndarray:
    """Random patches uint8 [patches, 3 · 14 · 14] of some media, one behind the other."""
    return rng.integers(0, 256, (sum(t * h * w for t, h, w in grids), 3 * 14 * 14), dtype=np.uint8)


def pixels(patches: np.ndarray) -> torch.Tensor:
    """As the model takes them."""
    return ((torch.from_numpy(patches).float() / 255 - 0.5) / 0.5).reshape(-1, 3, 14, 14)


def resized_image(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An image [height, width, 3] that is too wide, and every 16th column of what torch resizes it to."""
    width, height = WIDE
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    scale = 512 * 14 / width
    size = (int(height * scale), int(width * scale))
    batch = torch.from_numpy(image).permute(2, 0, 1)[None]
    small = torch.nn.functional.interpolate(batch, size=size, mode="bicubic", antialias=True)
    return image, small[0].permute(1, 2, 0).numpy()[:, ::16]


@torch.no_grad()
def main() -> None:
    model, raw = reference_model()
    rng = np.random.default_rng(0)
    out: dict[str, np.ndarray] = {"grids": np.array(GRIDS), "patches": patches_of(GRIDS, rng)}
    seen = model.model.get_image_features(pixels(out["patches"]), torch.tensor(GRIDS), return_dict=True).pooler_output
    for index, rows in enumerate(seen):
        out[f"rows.{index}"] = rows.numpy()

    placeholder = raw["media_placeholder_token_id"]
    counts = [h * w // 4 for _, h, w in PROMPT_GRIDS]
    ids = rng.integers(0, 300, 24)
    pieces = [ids[:9], [placeholder] * counts[0], ids[9:14], [placeholder] * counts[1], ids[14:]]
    out["prompt_ids"] = np.concatenate(pieces)[None]
    out["prompt_grids"], out["prompt_patches"] = np.array(PROMPT_GRIDS), patches_of(PROMPT_GRIDS, rng)
    out["prompt_logits"] = model(
        input_ids=torch.from_numpy(out["prompt_ids"]), pixel_values=pixels(out["prompt_patches"]),
        image_grid_thw=torch.tensor(PROMPT_GRIDS),
    ).logits.numpy()  # fmt: skip
    out["wide_image"], out["wide_resized"] = resized_image(rng)
    path = DATA / "vision_reference.safetensors"
    ints = {name: value.astype(np.int32) if value.dtype == np.int64 else value for name, value in out.items()}
    save_file({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in ints.items()}, path)
    path.chmod(0o644)


if __name__ == "__main__":
    main()
