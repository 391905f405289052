"""The scaling table against counts made by hand."""

from pathlib import Path

import jax
import pytest

from kimi_jax.evaluation.scaling import measure_scaling

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.slow
def test_one_device_sends_nothing_and_eight_reduce_each_half_layer(engines):
    alone, eight = measure_scaling(
        DATA / "tiny_random", DATA / "tiny_random_drafter", ["local", "hgx-ib-8"], budget=4, context=16
    )
    assert (alone.devices, alone.messages, alone.message_bytes) == (1, 0, 0)
    held = sum(x.nbytes for x in jax.tree.leaves(engines().parameters))
    assert alone.weight_bytes == held
    layers = engines().config.num_hidden_layers
    assert eight.devices == 8
    # A sum after each half of a target's layer, at least; the embedding, the head and the drafter add theirs.
    assert eight.messages > 2 * layers
    assert held / 8 < eight.weight_bytes < held
