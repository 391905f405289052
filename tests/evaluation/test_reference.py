"""vLLM's form of log-probabilities, filled with those of transformers' logits."""

import json

import numpy as np
import pytest

from kimi_jax.evaluation.logits import InputError
from kimi_jax.evaluation.reference import agreement, read_references

TOP = 5


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.fixture
def rows(reference):
    """What vLLM answers with prompt_logprobs=5: the top tokens and the id itself, nothing for the first id."""
    result = []
    for ids, values in zip(reference["input_ids"], log_softmax(reference["logits"]), strict=True):
        entries: list = [None]
        for row in range(len(ids) - 1):
            tokens = {*np.argsort(values[row])[-TOP:].tolist(), int(ids[row + 1])}
            entries.append({str(t): {"logprob": values[row, t], "decoded_token": "?"} for t in tokens})
        result.append({"prompt_token_ids": ids.tolist(), "prompt_logprobs": entries})
    return result


@pytest.fixture
def written(tmp_path):
    def write(rows):
        path = tmp_path / "reference.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return path

    return write


def test_the_model_agrees_with_transformers(engines, rows, written, reference):
    engine = engines()
    found = read_references(written(rows), 576)
    told = []
    result = agreement(engine, found, told.append)
    assert result.places == 3 * 23
    assert result.values == sum(len(entry or ()) for row in rows for entry in row["prompt_logprobs"])
    assert result.largest_difference < 1e-4
    assert result.same_top_token == 1.0
    values, ids = log_softmax(reference["logits"]), reference["input_ids"]
    nats = [values[s, r, ids[s, r + 1]] for s in range(3) for r in range(23)]
    assert result.perplexity == pytest.approx(np.exp(-np.mean(nats)), rel=1e-4)
    assert result.reference_perplexity == pytest.approx(np.exp(-np.mean(nats)), rel=1e-9)
    assert sum(told) == 3 * 24


def test_a_difference_is_found_where_it_is(engines, rows, written):
    entry = rows[1]["prompt_logprobs"][7]
    token = max(entry, key=lambda t: entry[t]["logprob"])
    entry[token] = entry[token]["logprob"] - 3.0  # a plain number is read too; no longer the likeliest
    result = agreement(engines(), read_references(written(rows), 576))
    assert result.largest_difference == pytest.approx(3.0, abs=1e-3)
    assert result.largest_at == (2, 8, int(token))
    assert result.same_top_token == pytest.approx(68 / 69)
    assert result.mean_difference == pytest.approx(3.0 / result.values, rel=0.01)


def test_ids_alone_have_no_top_token(engines, rows, written):
    row = rows[0]
    for place in range(1, 24):
        own = str(row["prompt_token_ids"][place])
        row["prompt_logprobs"][place] = {own: row["prompt_logprobs"][place][own]}
    result = agreement(engines(), read_references(written([row]), 576))
    assert (result.values, result.same_top_token) == (23, None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1: expected prompt_token_ids and prompt_logprobs"),
        ("[1]", "line 1"),
        ({"prompt_token_ids": [1, 2]}, "KeyError: 'prompt_logprobs'"),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None]}, "2 ids and 1 entries"),
        ({"prompt_token_ids": [1], "prompt_logprobs": [None]}, "two or more"),
        ({"prompt_token_ids": [1, 576], "prompt_logprobs": [None, {"1": -1.0}]}, "576 is no id of 0..575"),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"576": -1.0}]}, "token 576 is no log-probability"),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"5": 0.5}]}, "token 5 is no log-probability"),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"x": -1}]}, "ValueError"),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [{"1": -1.0}, {"1": -1.0}]}, "first entry is not null"),
        ({"prompt_token_ids": [1, 2], "prompt_logprobs": [None, None]}, "no entry has"),
    ],
)
def test_other_files_are_refused_by_line(row, message, written):
    with pytest.raises(InputError, match=message):
        read_references(written([row]), 576)


def test_an_empty_file_is_refused(written):
    with pytest.raises(InputError, match="no lines"):
        read_references(written([""]), 576)
