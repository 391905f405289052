"""The steps of the check, each run in a process of its own with a time limit: a hang is a verdict like any other."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

Verdict = Literal["pass", "fail", "skip"]
MARK = "@@line@@"
VALUES = {
    "int4_moe": (
        "ep-6-rows-1", "ep-6-rows-64", "ep-6-rows-512", "ep-24-rows-128", "ep-48-rows-1", "ep-48-rows-16",
        "ep-48-rows-64", "ep-48-rows-512", "ep-48-rows-1024", "ep-48-rows-4096", "tp-8-rows-1", "tp-8-rows-64",
        "tp-32-rows-64",
    ),
    "tree_attention": (
        "tp8-decode", "tp8-tree9", "tp8-tree33", "tp8-long", "tp8-unequal", "dp-decode", "dp-tree33", "dp-tree65",
    ),
}  # fmt: skip
"""Shapes of each operation: every engine and tile size, split k, narrow scales, clusters, cut and spanning requests."""
GRAPHS = {
    "as set": "",
    "no graphs": "--xla_gpu_enable_command_buffer=",
    "collectives and loops in graphs": "--xla_gpu_enable_command_buffer=+COLLECTIVES,+WHILE",
}
"""XLA flags that a round is timed with, one after the other."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One verdict."""

    section: str
    name: str
    verdict: Verdict
    figure: str
    """What was found, in a few words."""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The figures."""


def say(name: str, good: bool | None, figure: str, **data: Any) -> None:
    """Prints a verdict, as a step's process does: pass, fail, or skip where nothing was judged."""
    verdict: Verdict = "skip" if good is None else "pass" if good else "fail"
    print(f"{MARK}{json.dumps([name, verdict, figure, data])}", flush=True)


@dataclasses.dataclass(frozen=True)
class Step:
    """What one process does: a function of `work.WORK` with its arguments."""

    section: str
    name: str
    work: str
    arguments: Mapping[str, Any]
    seconds: float
    """It is ended after so long."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def card_steps(layers: int, random: bool, plain: bool) -> list[Step]:
    """What a card is taken through; about ten minutes."""
    steps = [Step("card", "rates", "card", {}, 120), Step("kernels", "self-check", "checks", {}, 120)]
    for operation, shapes in VALUES.items():
        for shape in shapes:
            arguments = {"operation": operation, "shape": shape, "plain": plain}
            steps.append(Step("kernels", f"{operation} {shape}", "kernel", arguments, 120))
    if random:
        steps += [
            Step("round", name, "random_round", {"layers": layers}, 300, {"XLA_FLAGS": _with(flag)} if flag else {})
            for name, flag in GRAPHS.items()
        ]
    return [*steps, Step("text", "bundled model", "text", {}, 120)]


def rehearsal_steps(card: str, layers: int, random: bool) -> list[Step]:
    """What needs no card: the kernels' values on the small table in the interpreter, and the round compiled."""
    # The interpreter blocks a thread of XLA's pool for each simulated warp.
    cpu = {"JAX_PLATFORMS": "cpu", "NPROC": "16", "PJRT_NPROC": "32"}
    steps = [
        Step("kernels", operation, "rehearse", {"operation": operation, "card": card}, 900, cpu) for operation in VALUES
    ]
    if random:
        steps.append(Step("round", f"compiled for {card}", "compiled_round", {"card": card, "layers": layers}, 1800))
    return [*steps, Step("text", "bundled model", "text", {}, 300, cpu)]


def _with(flag: str) -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def run(step: Step, module: str = "kimi_jax.gpu_check.work") -> Iterator[Line]:
    """Runs a step and yields its lines; one more that fails where the process hung, was killed or ended badly."""
    command = [sys.executable, "-m", module, step.work, json.dumps(dict(step.arguments))]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=os.environ | dict(step.environment),
            timeout=step.seconds,
        )  # fmt: skip
        out, err, status = child.stdout, child.stderr, child.returncode
    except subprocess.TimeoutExpired as error:  # its output is bytes, whatever was asked for
        out, err, status = bytes(error.stdout or b"").decode(errors="replace"), "", None
    for line in out.splitlines():
        if line.startswith(MARK):
            name, verdict, figure, data = json.loads(line.removeprefix(MARK))
            yield Line(step.section, f"{step.name}: {name}" if name else step.name, verdict, figure, data)
    if status is None:
        yield Line(step.section, step.name, "fail", f"hung: ended after {step.seconds:.0f} s")
    elif status:
        last = next((line for line in reversed(err.splitlines()) if line.strip()), f"status {status}")
        yield Line(step.section, step.name, "fail", last.strip()[:300], {"status": status})
