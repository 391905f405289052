"""Verdicts of child processes, and what a card is taken through. The GPU's own part needs one."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.commands import benchmark_gpu
from kimi_jax.gpu_check import steps, work
from kimi_jax.gpu_check.round import _random
from kimi_jax.gpu_check.steps import Line, Step, card_steps, rehearsal_steps, run
from meshes.hardware import gpu
from pallas_kernels.operation import Device
from pallas_kernels.registry import OPERATIONS

ROOT = Path(__file__).parents[2]
CHILD = """
import json, os, sys, time
from kimi_jax.gpu_check.steps import say
say("first", True, "fine", seconds=1.5)
kind = json.loads(sys.argv[2])["kind"]
if kind == "hang":
    time.sleep(60)
if kind == "crash":
    os.abort()
if kind == "error":
    raise RuntimeError("the sums are wrong")
say("", None, "not judged")
"""


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("well", ("step", "skip", "not judged")),
        ("hang", ("step", "fail", "hung: ended after 5 s")),
        ("crash", ("step", "fail", "status -6")),
        ("error", ("step", "fail", "RuntimeError: the sums are wrong")),
    ],
)
def test_a_childs_end_is_a_verdict_and_what_it_said_before_is_kept(kind, last, tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    first, end = run(Step("kernels", "step", "any", {"kind": kind}, 5, path), module="child")
    assert first == Line("kernels", "step: first", "pass", "fine", {"seconds": 1.5})
    assert (end.section, end.name, end.verdict, end.figure) == ("kernels", *last)


def test_every_step_is_known_and_named_once():
    for chosen in (card_steps(3, True, False), rehearsal_steps("h200", 3, True)):
        assert {step.work for step in chosen} <= set(work.WORK)
        assert len({(step.section, step.name) for step in chosen}) == len(chosen)
        assert {step.section for step in chosen} >= {"kernels", "round", "text"}
    assert not [step for step in card_steps(3, False, False) if step.section == "round"]


@pytest.mark.parametrize("card", ["h200", "gb300"])
def test_the_shapes_take_every_engine_tile_size_and_form_of_a_kernel(card):
    facts = gpu(card)
    device = Device(facts.device_kind, "{}.{}".format(*facts.compute_capability), facts.core_count)
    experts, attention = OPERATIONS["int4_moe"], OPERATIONS["tree_attention"]

    def chosen(operation):
        names = steps.VALUES[operation.name]
        return [operation.choose(operation.shapes[name], jnp.bfloat16, device) for name in names]

    assert {choice.implementation for choice in chosen(experts)} == set(experts.available(device))
    tiles = [choice.config.gate_up for choice in chosen(experts)]
    assert {tile.rows for tile in tiles} == {8, 16, 32, 64}
    assert {tile.split > 1 for tile in tiles} == {True, False}
    assert 64 in {choice.config.down.k_step for choice in chosen(experts)}  # scales narrower than a copy
    assert {choice.config.cluster for choice in chosen(attention)} == ({1, 2} if card == "h200" else {1})


def lines_of(*verdicts):
    return lambda step: [Line(step.section, step.name, verdict, "figure") for verdict in verdicts]


def test_one_failure_is_the_answer_and_the_status(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(benchmark_gpu, "run", lines_of("pass", "fail"))
    options = benchmark_gpu.Options(rehearse="h200", only="text|int4_moe", output=tmp_path / "all.json")
    with pytest.raises(SystemExit, match="1"):
        benchmark_gpu.gpu(options)
    out = capsys.readouterr().out
    assert out.splitlines()[0].strip() == "FAIL: 2 of 4 verdicts"
    assert max(map(len, out.splitlines())) <= 80
    assert json.loads(options.output.read_text())["failed"] == 2


def test_all_well_is_status_0_and_json_has_every_figure(monkeypatch, capsys):
    monkeypatch.setattr(benchmark_gpu, "run", lines_of("pass"))
    benchmark_gpu.gpu(benchmark_gpu.Options(rehearse="h200", only="text", json=True))
    assert json.loads(capsys.readouterr().out) == {
        "failed": 0,
        "lines": [{"section": "text", "name": "bundled model", "verdict": "pass", "figure": "figure", "data": {}}],
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no GPU is visible to this process: run it on one, or take --rehearse"),
        ({"rehearse": "h200", "only": "nothing"}, "no step matches 'nothing'; there are kernels int4_moe"),
    ],
)
def test_what_cannot_be_done_is_refused(options, message, monkeypatch):
    monkeypatch.setattr(benchmark_gpu, "visible_gpu_count", lambda: 0)
    with pytest.raises(ValueError, match=message):  # which a command tells in one line, with status 1
        benchmark_gpu.gpu(benchmark_gpu.Options(**options))


def test_random_weights_keep_activations_near_one():
    key = jax.random.key(0, impl="rbg")
    words = _random((2, 64, 32), jnp.dtype(jnp.int32), key)
    scale = _random((2, 64, 8), jnp.dtype(jnp.bfloat16), key)
    from kimi_jax.quantization import Int4Weight, dequantize

    unpacked = np.asarray(dequantize(Int4Weight(words, scale)))
    assert np.std(unpacked) * math.sqrt(256) == pytest.approx(1.0, rel=0.1)
    dense = np.asarray(_random((256, 512), jnp.dtype(jnp.bfloat16), key), np.float32)
    assert np.std(dense) * math.sqrt(512) == pytest.approx(1.0, rel=0.02)
    assert (np.asarray(_random((7,), jnp.dtype(jnp.float32), key)) == 1).all()


@pytest.mark.parametrize(
    "card", [pytest.param("h200", marks=pytest.mark.slow), pytest.param("gb300", marks=pytest.mark.exhaustive)]
)
def test_a_rehearsal_passes(card, tmp_path):
    output = tmp_path / "all.json"
    script = str(ROOT / "scripts" / "benchmark.py")
    command = [sys.executable, script, "gpu", "--rehearse", card, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads(output.read_text())["lines"]
    assert {line["verdict"] for line in lines} == {"pass"}
    assert {line["section"] for line in lines} == {"kernels", "round", "text"}
    assert all(line["data"]["thunks"]["graphs"] > 0 for line in lines if line["section"] == "round")
