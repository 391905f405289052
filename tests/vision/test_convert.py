"""Conversions keep tower and projector byte for byte, and a sharded checkpoint sees."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.checkpoint.convert import to_huggingface, to_orbax
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.plan import SKIPPED_FAMILIES
from kimi_jax.checkpoint.safetensors import Files, open_checkpoint
from kimi_jax.checkpoint.sharded.manifest import read_manifest
from kimi_jax.config import ModelConfig
from kimi_jax.decoding import loading
from kimi_jax.decoding.loading import open_vision
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.sharding import rules

SOURCE = Path(__file__).parents[1] / "data" / "tiny_random"


def octets(folder):
    """The bytes of tower and projector, with their types and shapes."""
    found = {}
    with Files() as files:
        for tensor in open_checkpoint(folder).values():
            if tensor.name.startswith(SKIPPED_FAMILIES):
                target = np.empty(tensor.nbytes, np.uint8)
                files.read_into(tensor, 0, target)
                found[tensor.name] = (tensor.dtype, tensor.shape, target.tobytes())
    return found


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A sharded checkpoint, and what is made from it again."""
    folder, config = tmp_path_factory.mktemp("converted"), ModelConfig.from_json(SOURCE)
    how = {"num_experts": config.n_routed_experts}
    to_orbax(SOURCE, folder / "sharded", CausalLM(config), config.key_prefix, dtype="bfloat16", **how)
    to_huggingface(folder / "sharded", folder / "again", CausalLM(config), config.key_prefix, **how)
    return folder


def test_bytes_are_kept_both_ways(converted):
    expected = octets(SOURCE)
    assert len(expected) > 30
    assert octets(converted / "sharded" / "vision") == octets(converted / "again") == expected
    index, original = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (converted / "again", SOURCE)
    )
    assert index["weight_map"].keys() == original["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in open_checkpoint(SOURCE).values())


def test_a_sharded_checkpoint_sees(converted, engines):
    engine = engines()
    found = open_vision(converted / "sharded", engine.config, engine.mesh, rules(engine.layout), jnp.float32)
    assert found is not None
    np.testing.assert_array_equal(
        found[1]["mm_projector"]["proj"][2]["weight"], engine.parameters["vision"]["mm_projector"]["proj"][2]["weight"]
    )


def test_a_cut_file_is_named(converted):
    file = converted / "sharded" / "vision" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    try:
        with pytest.raises(CheckpointError, match=r"vision/model\.safetensors: .* expected"):
            read_manifest(converted / "sharded")
    finally:
        file.write_bytes(whole)


def test_weights_of_text_alone_are_opened_without_a_tower(engines, monkeypatch):
    def text_alone(folder):
        tensors = open_checkpoint(folder)
        return {name: tensors[name] for name in tensors if not name.startswith(SKIPPED_FAMILIES)}

    engine = engines()
    monkeypatch.setattr(loading, "open_tensors", text_alone)
    assert open_vision(SOURCE, engine.config, engine.mesh, rules(engine.layout), jnp.float32) is None


def test_a_missing_tensor_is_named(engines, monkeypatch):
    def without_one(folder):
        return {name: tensor for name, tensor in open_checkpoint(folder).items() if not name.endswith("norm0.bias")}

    engine = engines()
    monkeypatch.setattr(loading, "open_tensors", without_one)
    with pytest.raises(CheckpointError, match=r"vision_tower\.encoder\.blocks\.0\.norm0\.bias: missing"):
        open_vision(SOURCE, engine.config, engine.mesh, rules(engine.layout), jnp.float32)
