"""Comparisons against NumPy, and of a model with one layer changed."""

import dataclasses

import jax
import numpy as np
import pytest

from kimi_jax.evaluation import compare as module
from kimi_jax.evaluation.compare import compare, record

LENGTHS = (24, 9, 24)
BATCH = 2


@pytest.fixture(scope="module")
def sequences(reference):
    return [ids[:length] for ids, length in zip(reference["input_ids"].tolist(), LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def recording(engines, sequences, tmp_path_factory):
    return record(engines("local"), sequences, tmp_path_factory.mktemp("first"), batch=BATCH)


def changed(engine, layer):
    """The engine with another norm weight in one layer."""
    target = engine.parameters["target"]
    layers = dict(target["model"]["layers"])
    layers[layer] = {
        **layers[layer],
        "input_layernorm": jax.tree.map(lambda x: x * 1.5, layers[layer]["input_layernorm"]),
    }
    return dataclasses.replace(
        engine, parameters={"target": {**target, "model": {**target["model"], "layers": layers}}}
    )


def test_what_is_recorded_is_the_references(recording, reference):
    expected = np.concatenate([values[:length] for values, length in zip(reference["logits"], LENGTHS, strict=True)])
    np.testing.assert_allclose(recording.logits, expected, atol=1e-4)


def test_a_model_does_not_differ_from_itself(engines, recording):
    result = compare(engines("local"), recording, tolerance=0, batch=BATCH)
    assert result.first_layer is None
    assert result.tokens == sum(LENGTHS)
    assert (result.top1_agreement, result.largest_logit_difference, result.kl_largest) == (1, 0, 0)


def test_another_mesh_differs_by_rounding(engines, recording):
    result = compare(engines("hgx-ib-16"), recording, tolerance=1e-5, batch=BATCH)
    assert result.first_layer is None
    assert 0 < result.largest_logit_difference < 1e-4


def test_the_changed_layer_is_named_and_the_figures_are_numpys(engines, recording, sequences, tmp_path):
    engine = changed(engines("local"), 2)
    result = compare(engine, recording, tolerance=1e-6, batch=BATCH)
    other = record(engine, sequences, tmp_path, batch=BATCH)
    assert result.first_layer == 2
    assert [layer.largest == 0 for layer in result.layers] == [True, True, False, False]

    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in map(np.float64, (recording.logits, other.logits)))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    kl = (p * np.log(p / q)).sum(-1)
    assert result.kl_mean == pytest.approx(kl.mean(), rel=1e-6)
    assert result.kl_largest == pytest.approx(kl.max(), rel=1e-6)
    assert result.top1_agreement == np.mean(p.argmax(-1) == q.argmax(-1)) < 1
    assert result.largest_logit_difference == np.abs(recording.logits - other.logits).max()
    distance = np.linalg.norm(other.streams - recording.streams, axis=-1) / np.linalg.norm(recording.streams, axis=-1)
    for layer, expected in zip(result.layers, distance.T, strict=True):
        assert layer.mean == pytest.approx(expected.mean(), rel=1e-5)
        assert layer.largest == pytest.approx(expected.max(), rel=1e-5)
    worst = result.layers[2]
    assert recording.place(worst.sequence, worst.position) == distance[:, 2].argmax()


def test_models_of_different_shapes_cannot_be_compared(engines, recording):
    engine = engines("local")
    narrow = dataclasses.replace(recording, logits=recording.logits[:, :-1])
    with pytest.raises(ValueError, match="they have vocab_size 575 and 576"):
        compare(engine, narrow, tolerance=0)


def test_a_full_disk_is_noticed_before_anything_runs(engines, sequences, tmp_path, monkeypatch):
    usage = module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"0\.0 GB needed for 57 tokens .* take fewer tokens"):
        record(engines("local"), sequences, tmp_path)
    assert not list(tmp_path.iterdir())
