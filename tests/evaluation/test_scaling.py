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
    engine = engines()
    held = sum(x.nbytes for x in jax.tree.leaves(engine.parameters))
    assert alone.weight_bytes == held
    assert eight.devices == 8
    # A sum after each half of a layer and after the embedding, in the target and in the drafter.
    sums = 2 * engine.config.num_hidden_layers + 1 + 2 * engine.drafter.config.num_hidden_layers + 1
    # Gathered: the drafter's fused taps; the largest logit of each rank and its token; for the tree each rank's
    # normaliser, its best log-probabilities and their tokens.
    assert eight.messages == sums + 1 + 2 + 3
    assert held / 8 < eight.weight_bytes < held
