"""What peers are given, and what is said where they are not installed."""

import sys
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.checkpoint.safetensors import open_checkpoint
from kimi_jax.evaluation import peers
from kimi_jax.evaluation.speed import Speed, row

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny_random"


def test_peers_get_the_checkpoints_weights(engines):
    """All of the file's tensors by its own names, experts in one array a layer with the exact products code × scale."""
    engine = engines()
    given = dict(peers._state(engine.parameters["target"]))
    prefix = engine.config.key_prefix
    names = {name.removeprefix(prefix) for name in open_checkpoint(CHECKPOINT) if name.startswith(prefix)}
    stacks = {
        f"model.layers.{layer}.mlp.experts.{stack}_proj"
        for layer in range(engine.config.first_k_dense_replace, engine.config.num_hidden_layers)
        for stack in ("gate_up", "down")
    }
    assert set(given) == {name for name in names if ".mlp.experts." not in name} | stacks
    stack = next(iter(sorted(stacks - {s for s in stacks if "down" in s})))
    layer = engine.parameters["target"]["model"]["layers"][engine.config.first_k_dense_replace]["mlp"]["experts"]
    up = layer["up_proj"]
    word, scale = int(np.asarray(up.packed)[1, 2, 0]) & 0xFFFFFFFF, float(np.asarray(up.scale, np.float32)[1, 2, 0])
    got = given[stack][1, engine.config.moe_intermediate_size + 2, :8]
    np.testing.assert_array_equal(got, [((word >> 4 * i & 15) - 8) * scale for i in range(8)])


def test_a_missing_package_names_the_command(engines, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(peers.PeerMissingError, match=r"torch cannot be imported.*--group fixtures"):
        peers.transformers_model(engines())


def test_rows_are_ratios_to_the_base():
    base = Speed("transformers", None, [10.0, 8.0, 12.0], 1.0, [[1, 2]])
    fast = Speed("ddtree", 16, [45.0], 6.5, [[1, 3]])
    assert row(base, base) == {
        "decoder": "transformers", "budget": None, "tokens_per_second_median": 10.0, "spread": 0.2,
        "acceptance_length": 1.0, "round_cost": 1.0, "speed_up": 1.0, "same_text": True,
    }  # fmt: skip
    assert row(fast, base)["speed_up"] == 4.5
    assert row(fast, base)["round_cost"] == 1.44  # 6.5 tokens in the time of 1.44 of its tokens: 6.5 / 4.5
    assert row(fast, base)["same_text"] is False
