"""The fixtures themselves: published bytes, the layout on disk, and whether wrong arithmetic would be noticed."""

import hashlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent
TINY, VARIANT = DATA / "tiny_random", DATA / "variant_ct"

numpy_model = runpy.run_path(str(DATA / "numpy_model.py"))
NumpyModel, MISTAKES, TOLERANCE = (numpy_model[name] for name in ("NumpyModel", "MISTAKES", "TOLERANCE"))
read_safetensors, reference_errors = numpy_model["read_safetensors"], numpy_model["reference_errors"]


def entries(directory: Path) -> dict[str, tuple[str, str, list[int]]]:
    """Name to (file, dtype, shape), from the headers alone."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        found |= {name: (path.name, entry["dtype"], entry["shape"]) for name, entry in header.items()}
    return found


def codes_and_scales(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Codes [groups, 32], -8 to 7, and scales [groups] of every packed weight."""
    tensors = read_safetensors(*sorted(directory.glob("model-*.safetensors")))
    codes, scales = [], []
    for name, packed in tensors.items():
        if name.endswith("weight_packed"):
            nibbles = packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
            codes.append(nibbles.reshape(-1, 32).astype(np.int8) - 8)
            scales.append(tensors[name.replace("packed", "scale")].reshape(-1))
    return np.concatenate(codes), np.concatenate(scales)


def test_the_published_configuration_is_untouched():
    raw = (DATA / "configs" / "kimi_k26.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == "85825ca6e18cbe539eb83ee09eedfb3f4222265929f06e9f535a6d9364f55899"


@pytest.mark.parametrize("name", ["kimi_k25", "kimi_k2_thinking", "deepseek_v3"])
def test_derived_configurations_are_current(name):
    derive = runpy.run_path(str(DATA / "configs" / "derive.py"))
    k26 = json.loads((DATA / "configs" / "kimi_k26.json").read_text())
    assert json.loads((DATA / "configs" / f"{name}.json").read_text()) == derive[name](k26)


def test_tiny_has_the_published_layout():
    found = entries(TINY)
    index = json.loads((TINY / "model.safetensors.index.json").read_text())
    assert {name: file for name, (file, _, _) in found.items()} == index["weight_map"]
    assert sorted(set(index["weight_map"].values())) == [f"model-{i:05d}-of-000007.safetensors" for i in range(1, 8)]
    expert = "language_model.model.layers.3.mlp.experts.15.down_proj."
    assert found[expert + "weight_packed"] == ("model-00004-of-000007.safetensors", "I32", [128, 32])
    assert found[expert + "weight_scale"][1:] == ("BF16", [128, 8])
    assert found[expert + "weight_shape"][1:] == ("I32", [2])
    assert found["language_model.model.layers.1.mlp.gate.e_score_correction_bias"][1:] == ("F32", [16])
    assert found["language_model.lm_head.weight"] == ("model-00005-of-000007.safetensors", "BF16", [576, 128])
    assert {name.split(".")[0] for name in found} == {"language_model", "mm_projector", "vision_tower"}
    published = json.loads((DATA / "configs" / "kimi_k26.json").read_text())
    config = json.loads((TINY / "config.json").read_text())
    assert config.keys() == published.keys()
    assert config["text_config"].keys() == published["text_config"].keys()
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 8e6


def test_tiny_follows_moonshots_scale_rule():
    """scale = absmax / 7: the largest code of every group is 7 or -7, and -8 never occurs."""
    codes, scales = codes_and_scales(TINY)
    assert codes.shape == (3 * 16 * 3 * 128 * 256 // 32, 32)
    np.testing.assert_array_equal(np.abs(codes).max(1), 7)
    assert scales.min() > 0


def test_variant_has_what_tiny_has_not():
    found = entries(VARIANT)
    assert found["model.layers.1.mlp.experts.0.up_proj.weight_shape"][1:] == ("I64", [2])
    config = json.loads((VARIANT / "config.json").read_text())
    assert config["rope_scaling"] is None
    assert config["model_type"] == "kimi_k2"
    codes, _ = codes_and_scales(VARIANT)
    assert (codes == -8).any()
    assert (codes == 7).any()


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("prefix", ["", "long_", "robust_"])
def test_reference_equals_the_independent_model(prefix, absorbed):
    reference = read_safetensors(DATA / "reference.safetensors")
    errors = reference_errors(NumpyModel(TINY, absorbed=absorbed), reference, prefix)
    assert len(errors) == {"": 23, "long_": 4, "robust_": 1}[prefix]
    assert max(errors.values()) < TOLERANCE / 2


def test_variant_reference_equals_the_independent_model():
    errors = reference_errors(NumpyModel(VARIANT), read_safetensors(VARIANT / "reference.safetensors"))
    assert max(errors.values()) < TOLERANCE / 2


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_known_mistake_would_be_noticed(mistake):
    reference = read_safetensors(DATA / "reference.safetensors")
    assert reference_errors(NumpyModel(TINY, mistake=mistake), reference)["logits"] > 100 * TOLERANCE


def test_greedy_ids_are_the_argmax_of_their_own_logits():
    """Each generated id is the largest logit after its prefix, with a lead that float32 rounding cannot close."""
    model = NumpyModel(TINY)
    for ids in read_safetensors(DATA / "reference.safetensors")["greedy_ids"]:
        logits = model.logits(ids)[7:-1]
        np.testing.assert_array_equal(logits.argmax(-1), ids[8:])
        best = np.sort(logits, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > 5e-3
