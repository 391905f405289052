"""Runs on simulated devices: rounds timed and traced, and dumps of a generation."""

import gzip
import html
import json
import re

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kimi_jax.decoding.engine import PLAIN
from kimi_jax.profiling import diff, dump, live, tables, trace
from kimi_jax.profiling.hlo import Instruction, Module
from kimi_jax.profiling.report import make_report
from kimi_jax.profiling.traffic import CONTROL
from meshes.presets import preset


@pytest.fixture(scope="module")
def machine_and_engine(shallow):
    return preset("local"), shallow()


def test_rounds_are_timed_and_traced_by_part(machine_and_engine, tmp_path):
    machine, engine = machine_and_engine
    load = live.Load(requests=2, context=20, budget=0, rounds=3)
    found = live.run(engine, machine, "h200", load, trace=tmp_path)
    assert len(found.round_seconds) == 3
    assert all(seconds > 0 for seconds in found.part_seconds.values())
    assert {"attention", "experts", "head"} <= set(found.part_seconds)
    # The named trace has the same operations under the names of parts, layers and scopes of the model.
    events = json.loads(gzip.decompress((tmp_path / trace.NAMED).read_bytes()))["traceEvents"]
    ran = [event for event in events if event["ph"] == "X"]
    assert len(ran) == len(trace.operations(tmp_path)) > 100
    # What is left is the embedding, the last norm and the commit of a round.
    assert sum(event["cat"] != "other" for event in ran) > 0.7 * len(ran)
    assert {event["cat"] for event in ran} >= set(found.part_seconds)
    experts = [event for event in ran if event["name"] == "experts, layer 1"]
    assert experts
    assert all("layer1/" in event["args"]["scope"] and "/experts" in event["args"]["scope"] for event in experts)
    busy = sum(event["dur"] for event in ran if event["cat"] == "attention" and event["args"]["opcode"] not in CONTROL)
    assert busy == pytest.approx(1e6 * 3 * found.part_seconds["attention"], rel=1e-3)
    # Scopes are those of the compiled program's own text; a copy that has none may take another neighbour's.
    computations = Module(found.compiled.text).computations.values()
    scopes = {i.name: i.op_name for computation in computations for i in computation.values()}
    same = [event for event in ran if scopes[event["args"]["hlo_op"]] == event["args"]["scope"]]
    assert len(same) > 0.95 * len(ran)
    assert {event["args"]["opcode"] for event in ran if event not in same} <= {"copy"}
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


def test_a_program_is_found_under_another_number():
    one, other = ({name: Instruction(name, op, (), (), "", False, "")} for name, op in (("a", "add"), ("a", "copy")))
    programs = {"jit_f(3)": one, "jit_g(4)": other}
    assert trace._program(programs, "jit_f", "4", {"a"}) == one  # g's number, f's name
    assert trace._program(programs, "jit_f", "3", {"b"}) == {}  # not its operation
    assert trace._program(programs | {"jit_f(5)": other}, "jit_f", "5", {"a"}) == other
    assert trace._program(programs | {"jit_f(5)": other}, "jit_f", "9", {"a"}) == {}  # they do not agree


def test_a_directory_without_a_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no profiler trace"):
        trace.operations(tmp_path)


def twice(compile_for):
    """Compiles without a dump before, so that JAX's compilation cache, switched on meanwhile, has the program."""

    def run(case, programs, arguments, *, dump):
        folder = dump.parents[1] / "cache"
        names = {
            "jax_enable_compilation_cache": True,
            "jax_compilation_cache_dir": str(folder),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        before = {name: getattr(jax.config, name) for name in names}
        for name, value in names.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        try:
            compile_for(case, programs, arguments)
            assert list(folder.iterdir())
            return compile_for(case, programs, arguments, dump=dump)
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()

    return run


def test_a_dump_that_lacks_files_warns(tmp_path):
    (tmp_path / "module_0001.jit_f.after_optimizations.txt").write_text("")
    with pytest.warns(UserWarning, match=r"lacks before_optimizations\.txt, buffer-assignment\.txt, after_optim.*pb: "):
        dump.write_index(tmp_path, "ENTRY %main (a: f32[]) -> f32[] {\n}", "a program")


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds is 0"):
        live.Load(requests=1, context=1, budget=0, rounds=0)


def test_dump_of_a_generation(machine_and_engine, tmp_path, monkeypatch):
    machine, engine = machine_and_engine
    monkeypatch.setattr(live, "compile_for", twice(live.compile_for))
    programs = engine.programs(PLAIN)
    live.dump_generation(engine, machine, "h200", programs, tmp_path / "dump", requests=1, context=10, new_tokens=4)
    for program in ("prefill", "decode"):
        index = (tmp_path / "dump" / program / "index.md").read_text()
        assert f"# XLA dump: {program} of " in index
        assert "before_optimizations.txt" in index
        assert "| attention | 1 |" in index
        assert dump.missing(tmp_path / "dump" / program) == []
    changed = {
        change.what
        for change in diff.changes(diff.load(tmp_path / "dump" / "prefill"), diff.load(tmp_path / "dump" / "decode"))
    }
    assert any(what.startswith("attention: instructions") for what in changed)
    assert diff.changes(diff.load(tmp_path / "dump" / "decode"), diff.load(tmp_path / "dump" / "decode")) == []
    with pytest.raises(ValueError, match="give a directory that --xla-dump wrote"):
        diff.load(tmp_path)
