"""evaluate.py as a user runs it."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kimi_jax.evaluation.perplexity import perplexity, read_documents, together

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "data" / "tiny_random"


@pytest.fixture
def evaluate(command):
    return functools.partial(command, "evaluate")


@pytest.mark.parametrize("mesh", ["local", "hgx-ib-16"])
def test_logits_are_the_references(evaluate, mesh, tmp_path):
    reference = load_file(ROOT / "tests" / "data" / "reference.safetensors")
    ids, output = tmp_path / "ids.json", tmp_path / "logits.npz"
    ids.write_text(json.dumps(reference["input_ids"].tolist()))
    evaluate("logits", "--checkpoint", CHECKPOINT, "--mesh", mesh, "--input-ids", ids, "--output", output)
    values = np.load(output)["logits"]
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, reference["logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "non-empty"), ("[[1, 2], [3]]", "list 2 has 1 ids"), ("[[1, 99999]]", "99999")],
)
def test_bad_ids_are_named(evaluate, content, message, tmp_path):
    (tmp_path / "ids.json").write_text(content)
    result = evaluate("logits", "--input-ids", tmp_path / "ids.json", "--output", tmp_path / "logits.npz", expect=1)
    assert message in result.err
    assert not (tmp_path / "logits.npz").exists()


@pytest.mark.slow
def test_perplexity_of_files(evaluate, engines, tmp_path):
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    texts[0].write_text("Once there was a fox named Mila, who lived near a forest. " * 3)
    texts[1].write_text("One day the fox found a coin.")
    command = ["perplexity", "--checkpoint", CHECKPOINT, "--mesh", "hgx-ib-16", "--window", "32", "--bos", "--json"]
    command += ["--journal", tmp_path / "journal", *texts]
    shown = json.loads(evaluate(*command).out)

    engine = engines("local")
    documents = read_documents(engine, texts, bos=True)
    expected = perplexity(engine, documents, window=32, stride=16, batch=8)
    assert [text["nats"] for text in shown["texts"]] == pytest.approx([e.nats for e in expected], rel=1e-4)
    assert [text["tokens"] for text in shown["texts"]] == [e.tokens for e in expected]
    assert shown["all"]["perplexity"] == pytest.approx(together(expected).perplexity, rel=1e-4)

    windows = [json.loads(line)["nats"] for line in (tmp_path / "journal").read_text().splitlines()[1:]]
    assert sum(windows) == pytest.approx(shown["all"]["nats"])


def test_two_that_are_the_same_are_not_compared(evaluate):
    assert "the two are the same" in evaluate("compare", "--other", "mesh=local", expect=1).err
