"""Runs on simulated devices: rounds timed and traced, and dumps of a generation."""

import html
import json
import re

import pytest

from kimi_jax.decoding.engine import PLAIN
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.profiling import diff, live, tables
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.report import make_report
from meshes.presets import preset


@pytest.fixture(scope="module")
def machine_and_engine(engines):
    return preset("local"), engines("local")


def test_rounds_are_timed_and_traced_by_part(machine_and_engine, tmp_path):
    machine, engine = machine_and_engine
    load = live.Load(requests=2, context=20, budget=0, rounds=3)
    found = live.run(engine, machine, "h200", load, trace=tmp_path)
    assert len(found.round_seconds) == 3
    assert all(seconds > 0 for seconds in found.part_seconds.values())
    assert {"attention", "experts", "head"} <= set(found.part_seconds)
    report = make_report(found.compiled)
    assert report.case.device_requests == 2
    data = json.loads(json.dumps(report.as_dict() | found.as_dict()))
    # A CPU has no card: no floor, no latency, and nothing of the GPU that such a machine would have.
    assert (data["gpu"], data["floor_us"], data["memory"]["card"], data["memory"]["free"]) == (None,) * 4
    assert {part[name] for part in data["parts"] for name in ("floor_us", "latency_us", "memory_us")} == {None}
    tables.write_page(report, tmp_path / "page.html", found)
    page = html.unescape(re.sub(r"<[^>]*>", "", (tmp_path / "page.html").read_text()))
    assert f"Measured: 3 rounds, median {1e3 * found.median_seconds:.2f} ms" in page
    busy = page.split("busy time of one device in a traced round")[1]
    shown = re.search(r"^attention +busy +([\d,.]+) ", busy, re.MULTILINE)
    assert shown is not None
    assert float(shown[1].replace(",", "")) == pytest.approx(1e6 * found.part_seconds["attention"], rel=1e-3)
    for word in ("h200", "floor", "Nothing here was measured"):
        assert word not in page


def test_a_directory_without_a_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no profiler trace"):
        live.part_seconds(tmp_path, Module("ENTRY %main (a: f32[]) -> f32[] {\n}"), 1)


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds is 0"):
        live.Load(requests=1, context=1, budget=0, rounds=0)


def test_dump_of_a_generation(machine_and_engine, tmp_path):
    machine, engine = machine_and_engine
    programs = engine.programs(Sampling(), PLAIN, 1)
    live.dump_generation(engine, machine, "h200", programs, tmp_path, requests=1, context=10, new_tokens=4)
    for program in ("prefill", "decode"):
        index = (tmp_path / program / "index.md").read_text()
        assert f"# XLA dump: {program} of " in index
        assert "before_optimizations.txt" in index
        assert "| attention | 1 |" in index
    changed = {change.what for change in diff.changes(diff.load(tmp_path / "prefill"), diff.load(tmp_path / "decode"))}
    assert any(what.startswith("attention: instructions") for what in changed)
    assert diff.changes(diff.load(tmp_path / "decode"), diff.load(tmp_path / "decode")) == []
    with pytest.raises(ValueError, match="give a directory that --xla-dump wrote"):
        diff.load(tmp_path)
