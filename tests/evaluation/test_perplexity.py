"""Perplexity against the reference's logits, on a mesh, and after a stop."""

import json

import numpy as np
import pytest

from kimi_jax.evaluation import perplexity as module
from kimi_jax.evaluation.perplexity import Document, Likelihood, perplexity, read_documents, together

WINDOW = {"window": 64, "stride": 64, "batch": 2}


def documents_of(reference):
    """The reference's sequences, one of them cut, as texts."""
    ids = reference["input_ids"].tolist()
    return [Document("whole", ids[0], 100), Document("cut", ids[1][:9], 30), Document("third", ids[2], 70)]


def nats_of(logits, ids):
    """The negative log-likelihood of all ids but the first."""
    logits = logits[: len(ids) - 1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    chosen = logits[np.arange(len(ids) - 1), ids[1:]]
    return float((np.log(np.exp(logits).sum(-1)) - chosen).sum())


@pytest.mark.parametrize("mesh", ["local", "hgx-ib-16"])
def test_every_token_weighs_the_same(engines, reference, mesh):
    documents = documents_of(reference)
    results = perplexity(engines(mesh), documents, **WINDOW)
    expected = [nats_of(logits, d.ids) for logits, d in zip(reference["logits"], documents, strict=True)]
    np.testing.assert_allclose([r.nats for r in results], expected, rtol=1e-5)
    assert [r.tokens for r in results] == [23, 8, 23]
    all_texts = together(results)
    assert all_texts.perplexity == pytest.approx(np.exp(sum(expected) / 54), rel=1e-5)
    assert all_texts.bits_per_byte == pytest.approx(sum(expected) / np.log(2) / 200, rel=1e-5)


def test_a_stopped_run_goes_on_with_the_same_result(engines, reference, tmp_path, monkeypatch):
    engine, documents, journal = engines("local"), documents_of(reference), tmp_path / "journal"
    whole = perplexity(engine, documents, **WINDOW)
    real, calls = type(engine).score, []

    def stops(engine, windows, *options):
        calls.append(windows)
        scored = real(engine, windows, *options)
        yield next(scored)
        if len(calls) == 1:
            raise KeyboardInterrupt
        yield from scored

    monkeypatch.setattr(type(engine), "score", stops)
    with pytest.raises(KeyboardInterrupt):
        perplexity(engine, documents, journal=journal, **WINDOW)
    with journal.open("a") as stream:
        stream.write('{"window": 2, "na')  # killed while writing
    assert perplexity(engine, documents, journal=journal, **WINDOW) == whole
    assert [len(windows) for windows in calls] == [len(calls[0]), len(calls[0]) - 1]
    assert perplexity(engine, documents, journal=journal, **WINDOW) == whole
    assert len(calls) == 2


def test_a_journal_of_another_run_is_refused(engines, reference, tmp_path):
    journal = tmp_path / "journal"
    module.Journal(journal, {"checkpoint": "", "texts": "", "window": 32, "stride": 64, "dtype": "float32"})
    with pytest.raises(ValueError, match=r"journal: belongs to another run \(different texts, window\)"):
        perplexity(engines("local"), documents_of(reference), journal=journal, **WINDOW)


@pytest.mark.parametrize("content", ["words\n", "words", "a\nb", "[]\n", json.dumps({"window": 1}) + "\n"])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path, content):
    (tmp_path / "notes").write_text(content)
    with pytest.raises(ValueError, match="not the journal of a perplexity run"):
        module.Journal(tmp_path / "notes", {"texts": ""})
    assert (tmp_path / "notes").read_text() == content


def test_a_journal_whose_first_line_was_cut_begins_anew(tmp_path):
    run = {"texts": "x", "window": 32}
    (tmp_path / "journal").write_text(json.dumps(run)[:9])
    module.Journal(tmp_path / "journal", run).add(0, 1.5)
    assert module.Journal(tmp_path / "journal", run).nats == {0: 1.5}


def test_texts_are_read_with_and_without_bos(engines, tmp_path):
    engine = engines("local")
    (tmp_path / "a.txt").write_text("héllo")
    plain, begun = (read_documents(engine, [tmp_path / "a.txt"], bos=bos)[0] for bos in (False, True))
    assert engine.tokenizer.decode(plain.ids) == "héllo"
    assert begun.ids == [engine.tokenizer.special_id("[BOS]"), *plain.ids]
    assert plain.utf8_bytes == 6


@pytest.mark.parametrize(("content", "message"), [(b"\xff", "not UTF-8"), (b"", "nothing to predict")])
def test_files_that_are_no_texts_are_named(engines, tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.txt: .*{message}"):
        read_documents(engines("local"), [tmp_path / "a.txt"], bos=False)


def test_there_must_be_a_text(engines):
    with pytest.raises(ValueError, match="no text: give one"):
        read_documents(engines("local"), [], bos=False)


def test_a_window_beyond_the_positions_is_refused(engines, reference):
    window = engines("local").config.max_position_embeddings + 1
    with pytest.raises(ValueError, match=f"window is {window}; the model has"):
        perplexity(engines("local"), documents_of(reference), window=window, stride=1, batch=1)


def test_hopeless_texts_have_infinite_perplexity():
    assert Likelihood("", 1, 800.0, 1).perplexity == np.inf
