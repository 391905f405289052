"""Loading drafters: the public keys in their spellings, refusals by name, shards where they belong."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.drafter.loader import load_drafter
from kimi_jax.parameters import declarations

DATA = Path(__file__).parents[1] / "data"
CASE = np.load(DATA / "ddtree" / "drafter_case.npz")
TARGET = dataclasses.replace(
    ModelConfig.from_json(DATA / "configs" / "kimi_k26.json"), hidden_size=64, vocab_size=97, num_hidden_layers=8
)
RAW = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_target_layers": 8,
    "block_size": 8, "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 96},
}  # fmt: skip
RAW2 = RAW | {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp"}


def weights(kind: str) -> dict[str, np.ndarray]:
    prefix = f"{kind}/w/"
    return {key.removeprefix(prefix): CASE[key] for key in CASE.files if key.startswith(prefix)}


def write(folder: Path, raw: dict, tensors: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def mesh(tp: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[:tp]).reshape(1, 1, tp), ("dp", "ep", "tp"))


def load(folder: Path, tp: int = 1, dtype=jnp.float32):
    return load_drafter(folder, TARGET, mesh(tp), RULES, dtype=dtype)


def flat(module, loaded) -> dict[str, jax.Array]:
    found = {}
    for declaration in declarations(module):
        node = loaded
        for name in declaration.path:
            node = node[name]
        found[declaration.key()] = node
    return found


@pytest.mark.parametrize(
    ("kind", "raw", "rename"),
    [
        ("dflash1", RAW, str),
        ("dflash1", RAW, "model.{}".format),
        ("dflash1", RAW, lambda key: {"fc.weight": "encoder.fc.weight"}.get(key, key)),
        ("dflash2", RAW2, str),
        ("dflash2", RAW2, lambda key: key.replace("codebook.weight", "codebook")),
    ],
    ids=["public", "prefix", "alias", "dflash2 converted", "dflash2 public"],
)
def test_every_spelling_loads(tmp_path, kind, raw, rename):
    expected = weights(kind)
    module, loaded = load(write(tmp_path, raw, {rename(key): value for key, value in expected.items()}))
    found = flat(module, loaded)
    assert len(found) == len(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key.replace("codebook.weight", "codebook")], value)
    assert module.config.draft_window == 4096


def test_heads_are_sharded_and_key_value_heads_replicated(tmp_path):
    module, loaded = load(write(tmp_path, RAW, weights("dflash1")), tp=4, dtype=jnp.bfloat16)
    found = flat(module, loaded)
    shards = {key: value.addressable_shards[0].data.shape for key, value in found.items()}
    assert shards["layers.0.self_attn.q_proj.weight"] == (16, 64)
    assert shards["layers.0.self_attn.k_proj.weight"] == (32, 64)
    assert shards["layers.0.self_attn.o_proj.weight"] == (64, 16)
    assert shards["layers.0.mlp.down_proj.weight"] == (64, 32)
    assert shards["fc.weight"] == (16, 192)
    for key, value in weights("dflash1").items():
        np.testing.assert_array_equal(found[key], value.astype(jnp.bfloat16))


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    tensors = weights("dflash1")
    del tensors["norm.weight"]
    tensors["markov_w1"] = np.zeros((97, 8), np.float32)
    tensors["layers.1.mlp.up_proj.weight"] = np.zeros((120, 64), np.float32)
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path, RAW, tensors))
    for part in ("norm.weight: missing", "markov_w1: not part of the model", r"up_proj.weight: has shape [120, 64]"):
        assert part in str(error.value)


def test_weights_with_other_taps_name_the_field(tmp_path):
    raw = RAW | {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 96}}
    with pytest.raises(CheckpointError, match=r"fc.weight: takes 192 inputs, but target_layer_ids names 2 taps"):
        load(write(tmp_path, raw, weights("dflash1")))


def test_one_weight_twice_is_refused(tmp_path):
    tensors = weights("dflash1")
    tensors["model.norm.weight"] = tensors["norm.weight"]
    with pytest.raises(CheckpointError, match=r"norm.weight and .*norm.weight are both norm.weight"):
        load(write(tmp_path, RAW, tensors))


def test_a_drafter_for_another_target_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_target_layers is 9, the target's num_hidden_layers is 8"):
        load(write(tmp_path, RAW | {"num_target_layers": 9}, weights("dflash1")))
