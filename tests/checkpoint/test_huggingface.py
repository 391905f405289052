"""Every array of the bundled checkpoint against the safetensors package's reading, on many meshes, byte for byte."""

import os
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.checkpoint import huggingface
from kimi_jax.checkpoint.plan import plan
from kimi_jax.checkpoint.safetensors import Files, open_checkpoint
from kimi_jax.parallel.placement import EMPTY, Placement, even_placement
from kimi_jax.parameters import declarations

RULES = {"heads": "tp", "mlp": "tp", "vocab": "tp", "expert": ("ep", "tp"), "expert_mlp": None}
WIDTH_RULES = {**RULES, "expert": "ep", "expert_mlp": "tp"}
PREFIX = "language_model."


def leaf(parameters, path):
    for name in path:
        parameters = getattr(parameters, name) if name in ("packed", "scale") else parameters[name]
    return parameters


def expected(declaration, tensors, slot_experts):
    """One array of the parameters from the safetensors package's tensors."""
    if not declaration.stacked:
        return tensors[PREFIX + declaration.key()].astype(declaration.dtype)
    zero = np.zeros(declaration.shape[1:], declaration.dtype)
    return np.stack([zero if e == EMPTY else tensors[PREFIX + declaration.key(e)] for e in slot_experts])


def assert_loaded(parameters, module, tensors, dtype=jnp.bfloat16):
    for declaration in declarations(module, dtype):
        array = leaf(parameters, declaration.path)
        wanted = expected(declaration, tensors, module.placement.slot_experts)
        assert array.dtype == wanted.dtype == declaration.dtype, declaration.path
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), declaration.path


REDUNDANT = Placement((*range(16), 3, 3, 7, EMPTY, 0, 1, 2, EMPTY), 16)


@pytest.mark.parametrize(
    ("axes", "rules", "placement"),
    [
        ((1, 1, 1), RULES, even_placement(16, 1)),
        ((2, 2, 4), RULES, even_placement(16, 8)),
        ((1, 3, 4), RULES, even_placement(16, 12)),
        ((1, 2, 8), WIDTH_RULES, even_placement(16, 2)),
        ((1, 4, 2), RULES, REDUNDANT),
    ],
)
def test_every_shard_holds_the_files_bytes(tiny, make_mesh, axes, rules, placement):
    parameters = tiny.load(make_mesh(*axes), rules, placement)
    assert_loaded(parameters, tiny.module(placement), tiny.tensors())
