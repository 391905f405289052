"""Saved benchmark runs and their page."""

import json
from pathlib import Path

import pytest

from kimi_jax.evaluation.runs import load, page, record

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_the_saved_runs():
    """`uv run scripts/benchmark.py page docs/data/benchmarks docs/benchmarks.md` writes it anew."""
    assert (DOCS / "benchmarks.md").read_text() == page(load(DOCS / "data" / "benchmarks"))


def test_a_run_becomes_a_table(tmp_path):
    rows = [{"decoder": "none", "budget": None, "tokens_per_second": 2256.04, "same_text": True},
            {"decoder": "ddtree", "budget": 16, "tokens_per_second": 51.25, "same_text": False}]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(record("speculation", "local", rows)))
    text = page(load(tmp_path))
    assert "| decoder | budget | tokens per second | same text |" in text
    assert "| none |  | 2,256 | yes |\n| ddtree | 16 | 51.25 | no |" in text
    assert "uv run scripts/benchmark.py" in text


@pytest.mark.parametrize(("content", "message"), [("", "not JSON"), ('{"results": []}', "no benchmark, command, ran")])
def test_what_is_no_run_is_named(tmp_path, content, message):
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(ValueError, match=rf"b\.json: {message}"):
        load(tmp_path)


def test_an_empty_folder_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"holds no saved run: scripts/benchmark\.py"):
        load(tmp_path)
