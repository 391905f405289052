"""A K2-Thinking-style checkpoint: no key prefix, no YaRN, -8 codes, int64 shapes."""

import numpy as np
from safetensors.numpy import load_file

from kimi_jax.model.rows import causal_rows


def test_logits_of_the_variant(engines, forward, request):
    directory = request.config.rootpath / "tests" / "data" / "variant_ct"
    expected = load_file(directory / "reference.safetensors")
    ids = expected["input_ids"].astype(np.int32)
    counts = np.full(len(ids), ids.shape[1], np.int32)
    engine = engines(checkpoint=directory, drafter=None)
    assert engine.config.key_prefix == ""
    assert engine.config.yarn is None
    result = forward(engine, causal_rows(ids, np.zeros(len(ids), np.int32), counts))
    np.testing.assert_allclose(result.logits, expected["logits"], atol=1e-4)
