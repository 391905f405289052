"""The bundled checkpoint, its model on meshes of the simulated devices, and the safetensors package's own reading."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import Mesh

from kimi_jax.checkpoint import huggingface
from kimi_jax.config import ModelConfig
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.placement import Placement, even_placement

DATA = Path(__file__).parents[1] / "data"
RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp", "expert": ("ep", "tp"), "expert_mlp": None}
WIDTH_RULES = {**RULES, "expert": "ep", "expert_mlp": "tp"}


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint folder and how to load it."""

    directory: Path

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_json(self.directory)

    def module(self, placement: Placement | None = None) -> CausalLM:
        return CausalLM(self.config, placement)

    def load(self, mesh=None, rules=RULES, placement=None, dtype=jnp.bfloat16, **options):
        mesh = make_mesh() if mesh is None else mesh
        placement = placement or even_placement(self.config.n_routed_experts, 1)
        return huggingface.load(
            self.directory, self.module(placement), self.config.key_prefix, mesh, rules, dtype=dtype,
            num_experts=self.config.n_routed_experts, slot_experts=placement.slot_experts, **options,
        )  # fmt: skip

    @property
    def weight_map(self) -> dict[str, str]:
        return json.loads((self.directory / "model.safetensors.index.json").read_text())["weight_map"]

    def file_of(self, key: str) -> Path:
        return self.directory / self.weight_map[key]

    def tensors(self) -> dict[str, np.ndarray]:
        """Every tensor as the safetensors package reads it."""
        result = {}
        for file in sorted(set(self.weight_map.values())):
            result |= safetensors.numpy.load_file(self.directory / file)
        return result

    def rewrite(self, changes: Mapping[str, np.ndarray | None], file: Path | None = None) -> None:
        """Replaces, adds (to `file`) or removes (None) tensors, with the safetensors package, in shards and index."""
        weight_map = self.weight_map
        for key, value in changes.items():
            path = file or self.file_of(key)
            held = safetensors.numpy.load_file(path)
            if value is None:
                del held[key], weight_map[key]
            else:
                held[key], weight_map[key] = value, path.name
            safetensors.numpy.save_file(held, path)
        index = {"metadata": {}, "weight_map": weight_map}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def tiny(tmp_path) -> Checkpoint:
    """A copy of the bundled checkpoint, to be changed at will."""
    shutil.copytree(DATA / "tiny_random", tmp_path / "tiny")
    return Checkpoint(tmp_path / "tiny")


def make_mesh(dp=1, ep=1, tp=1) -> Mesh:
    return Mesh(np.array(jax.devices()[: dp * ep * tp]).reshape(dp, ep, tp), ("dp", "ep", "tp"))


@pytest.fixture(name="make_mesh")
def _make_mesh():
    return make_mesh
