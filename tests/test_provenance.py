"""The record of what a result was obtained with."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from kimi_jax import provenance as module
from kimi_jax.commands.options import EngineOptions, LayoutOptions
from kimi_jax.commands.progress import open_engine
from kimi_jax.decoding.engine import Draft
from kimi_jax.opening import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER
from kimi_jax.provenance import SAMPLE_BYTES, commit, fingerprint, provenance

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "tiny_random"


def test_copies_have_the_same_fingerprint_and_changes_another(tmp_path):
    shutil.copytree(TINY, tmp_path / "copy")
    before = fingerprint(TINY)
    (tmp_path / "copy" / "README.md").write_text("what a card says does not count")
    (tmp_path / "copy" / ".cache").mkdir()
    (tmp_path / "copy" / ".cache" / "lock").write_text("")
    assert fingerprint(tmp_path / "copy") == before
    (shard, *_) = sorted((tmp_path / "copy").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    changed = fingerprint(tmp_path / "copy")
    assert changed != before
    shard.rename(shard.with_name("other.safetensors"))
    assert fingerprint(tmp_path / "copy") not in (changed, before)


@pytest.mark.parametrize("place", [0, 5 * SAMPLE_BYTES, 10 * SAMPLE_BYTES - 1])
def test_large_files_are_sampled_at_three_places(tmp_path, place):
    data = bytearray(10 * SAMPLE_BYTES)
    (tmp_path / "large").write_bytes(data)
    before = fingerprint(tmp_path)
    data[place] = 1
    (tmp_path / "large").write_bytes(data)
    assert fingerprint(tmp_path) != before


def test_the_record_says_what_ran_on_what():
    assert len(jax.devices()) == 72, "started for all tests, before this one asks for 8"
    options = EngineOptions(layout=LayoutOptions("hgx-ib-8", cache="split"))
    opened = open_engine(options, Console(quiet=True), BUNDLED_DRAFTER)
    record = json.loads(json.dumps(provenance(opened, Draft("ddtree", 7), seed=11)))
    assert record["checkpoint"] == {
        "path": str(BUNDLED_CHECKPOINT.resolve()),
        "fingerprint": fingerprint(BUNDLED_CHECKPOINT),
    }
    assert record["drafter"]["fingerprint"] == fingerprint(BUNDLED_DRAFTER)
    assert (record["machine"], record["dtype"], record["simulated"]) == ("hgx-ib-8", "float32", True)
    assert record["devices"] == "8 × cpu"
    layout = record["layout"]
    assert layout["dp"] * layout["ep"] * layout["tp"] == 8
    assert layout["cache"] == "split"
    assert (record["speculation"]["budget"], record["seed"]) == (7, 11)
    for name in ("jax", "jaxlib", "kimi-jax"):
        assert record["versions"][name.replace("-", "_")] == importlib.metadata.version(name)


def test_the_commit_is_the_checkouts_own(tmp_path, monkeypatch):
    package = tmp_path / "kimi_jax"
    package.mkdir()
    (package / "provenance.py").write_text("")
    monkeypatch.setattr(module, "__file__", str(package / "provenance.py"))
    assert commit() is None, "no checkout"

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", *identity, "-C", tmp_path, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    assert commit() == git("rev-parse", "HEAD")
    (package / "provenance.py").write_text("changed")
    assert commit() == git("rev-parse", "HEAD") + "+changes"


@pytest.mark.slow
def test_tasks_log_every_sample(tmp_path):
    log = tmp_path / "samples.jsonl"
    command = ["tasks", "--prompts", "2", "--families", "add", "upper", "--budgets", "4"]
    command += ["--log-samples", log, "--json"]
    result = subprocess.run(
        [sys.executable, "scripts/evaluate.py", *map(str, command)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout)
    head, *samples = (json.loads(line) for line in log.read_text().splitlines())
    assert head["run"]["checkpoint"] == shown["run"]["checkpoint"]
    assert [sample["family"] for sample in samples] == ["add", "add", "upper", "upper"]
    for way, scores in shown["scores"].items():
        assert sum(sample["answers"][way]["exact"] for sample in samples) == scores["all"]["exact"]
        assert sum(len(sample["answers"][way]["token_ids"]) for sample in samples) == scores["all"]["tokens"]
    assert all(s["answers"]["none"]["text"] == s["reference"] for s in samples), "the bundled model knows these"
