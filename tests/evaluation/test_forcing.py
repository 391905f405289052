"""Logits of given ids in chunks, against the reference's."""

import numpy as np
import pytest

from kimi_jax.decoding import forcing
from kimi_jax.decoding.forcing import force, logits_of

pytestmark = pytest.mark.core


def test_chunks_see_what_came_before_and_share_a_step(engines, reference):
    engine, ids = engines("local"), reference["input_ids"].tolist()
    chunks = list(force(engine, logits_of, [ids[0], ids[1][:7]], chunk=16))
    assert len(chunks) == -(-len(ids[0]) // 16) > 1
    assert [chunk.counts[1] for chunk in chunks] == [7] + [0] * (len(chunks) - 1)
    whole = np.concatenate([chunk.values[0, : chunk.counts[0]] for chunk in chunks])
    np.testing.assert_allclose(whole, reference["logits"][0], atol=1e-4)
    np.testing.assert_allclose(chunks[0].values[1, :7], reference["logits"][1, :7], atol=1e-4)
    step = forcing._step(engine.model, engine.mesh, tuple(engine.rules.items()), logits_of, ())
    compiled = step._cache_size()
    list(force(engine, logits_of, [ids[0], ids[1]], chunk=16))
    assert step._cache_size() == compiled


@pytest.mark.parametrize(
    ("inputs", "message"),
    [([[1], []], "sequence 2 has 0 tokens"), ([[1, -2]], "outside 0"), (None, "the model takes 1 to")],
)
def test_what_cannot_be_run_is_refused(engines, inputs, message):
    inputs = inputs or [[1] * (engines("local").config.max_position_embeddings + 1)]
    with pytest.raises(ValueError, match=message):
        list(force(engines("local"), logits_of, inputs))


def test_an_engine_whose_experts_move_is_refused(engines):
    with pytest.raises(ValueError, match="experts of this engine move"):
        list(force(engines("hgx-ib-16").rebalancing(4), logits_of, [[1, 2]]))
