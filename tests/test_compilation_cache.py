"""JAX's compilation cache in the user's folder: a second start compiles nothing, and who wants to can do without."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from kimi_jax import compilation_cache

ROOT = Path(__file__).parents[1]


@pytest.fixture
def configured():
    """JAX's settings of the cache as they were, whatever a test does."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_compilation_cache_max_size",
             "jax_persistent_cache_min_compile_time_secs")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def decode(caches, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    result = subprocess.run(
        [sys.executable, "scripts/decode.py", "--checkpoint", "tests/data/tiny_random", "--speculation", "none",
         "--max-new-tokens", "4", "--raw", "--json", *arguments, "Hello"],
        cwd=ROOT, capture_output=True, text=True, env=environment | {"XDG_CACHE_HOME": str(caches)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.partition('"summary"')[0]


def programs(caches):
    """Those of decoding; whether small ones took long enough to be kept depends on the machine's moment."""
    kept = (path for name in ("jit_decode", "jit_chunk") for path in caches.rglob(f"{name}*-cache"))
    return {path.name: path.stat().st_mtime_ns for path in kept}


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_says_the_same(tmp_path):
    first = decode(tmp_path)
    kept = programs(tmp_path)
    assert {name.partition("-")[0] for name in kept} == {"jit_decode", "jit_chunk"}
    (folder,) = (tmp_path / "kimi_jax" / "xla").iterdir()
    assert not folder.stat().st_mode & 0o077, "who can write compiled programs can run code"
    assert decode(tmp_path) == first
    assert programs(tmp_path) == kept


@pytest.mark.slow
@pytest.mark.parametrize("without", [("--no-cache",), ("--xla-dump", "DUMP")])
def test_the_cache_is_left_alone(without, tmp_path):
    decode(tmp_path / "caches", *(str(tmp_path / "dump") if word == "DUMP" else word for word in without))
    assert not (tmp_path / "caches").exists()
    if "--xla-dump" in without:
        assert list((tmp_path / "dump").rglob("*after_optimizations.txt"))


def test_each_jaxlib_and_processor_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = compilation_cache.folder()
    assert here.parent == tmp_path / "kimi_jax" / "xla"
    monkeypatch.setattr(compilation_cache, "processor_type", lambda: "x86_64-of-another-kind")
    there = compilation_cache.folder()
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"jaxlib": "0.99.0"}[name])
    newer = compilation_cache.folder()
    assert len({here, there, newer}) == 3
    assert newer.name == "jaxlib-0.99.0-x86_64-of-another-kind"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG's rule: such a value is ignored
    assert compilation_cache.folder().is_relative_to(Path.home() / ".cache")


def test_a_folder_of_the_users_choice_is_kept(tmp_path, monkeypatch, configured):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "chosen"))
    compilation_cache.switch(True)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "chosen")
    assert not (tmp_path / "caches").exists()
    compilation_cache.switch(False)
    assert not jax.config.jax_enable_compilation_cache


def test_a_folder_that_cannot_be_made_leaves_the_cache_off(tmp_path, monkeypatch, configured):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation_cache.switch(True)
    assert jax.config.jax_compilation_cache_dir is None


def test_the_cache_is_bounded(tmp_path, monkeypatch, configured):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compilation_cache.switch(True)
    assert jax.config.jax_compilation_cache_max_size == compilation_cache.MAX_BYTES == 4 * 1024**3
