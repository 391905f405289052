"""A run on this machine's devices: measured rounds beside the compiled program's report, and a profiler trace."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax.decoding.engine import PLAIN, Draft, Engine
from kimi_jax.decoding.generate import Limits, chunk_rows, shape_of
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.session import Session
from kimi_jax.parameters import Parameters
from kimi_jax.profiling.case import Case, Program
from kimi_jax.profiling.compile import Compiled, compile_for, program_arguments
from kimi_jax.profiling.dump import write_index
from kimi_jax.profiling.trace import NAMED, operations, part_seconds, write_named
from meshes.presets import Preset

WARM_UP = 2
"""Rounds that run before any is measured."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What is run."""

    requests: int
    """In the whole machine."""
    context: int
    """Cached tokens of each before the first round."""
    budget: int
    rounds: int
    """Measured ones."""

    def __post_init__(self) -> None:
        for name in ("requests", "context", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


@dataclasses.dataclass(frozen=True)
class Live:
    """A measured run."""

    compiled: Compiled
    round_seconds: tuple[float, ...]
    """Of each measured round, from its dispatch to its end."""
    part_seconds: dict[str, float]
    """Busy time of one device in one round by part, from a trace of as many rounds more."""

    @property
    def median_seconds(self) -> float:
        """Seconds of the median measured round."""
        return statistics.median(self.round_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, beside the report's."""
        return {"measured_round_seconds": list(self.round_seconds), "traced_part_seconds": self.part_seconds}


def card_of(engine: Engine, gpu: str) -> str | None:
    """The card that a run is held against: `gpu`, or None where the devices are no GPUs."""
    return gpu if engine.mesh.devices.flat[0].platform == "gpu" else None


def run(
    engine: Engine,
    machine: Preset,
    gpu: str,
    load: Load,
    *,
    trace: Path | None = None,
    dump: Path | None = None,
    stage: Callable[[str], None] = lambda name: None,
) -> Live:
    """Fills the cache with random text, then runs and times rounds one by one.

    A round's time does not depend on what it accepts, so the text does not matter; how experts are picked does, a
    little. The report's context is that of the last round.

    Args:
      gpu: whose data sheet the floors are taken from; on devices that are no GPUs there are none.
      trace: directory that keeps the profiler trace of as many rounds more.
      dump: directory for XLA's dump.
    """
    draft = Draft("ddtree", load.budget) if load.budget and engine.drafter is not None else PLAIN
    programs = engine.programs(draft)
    steps = programs.speculation.max_depth + 1
    new_tokens = (WARM_UP + 2 * load.rounds) * steps + 1
    drafter = None if engine.drafter is None else engine.drafter.config
    case = Case(
        engine.config, machine, card_of(engine, gpu), load.requests, load.context + new_tokens,
        budget=0 if draft is PLAIN else load.budget, drafter=drafter, dtype=engine.dtype,
    )  # fmt: skip
    random = np.random.default_rng(0)
    prompts = random.integers(0, engine.config.vocab_size // 2, (load.requests, load.context)).tolist()
    shape = shape_of(programs, [load.context] * load.requests, [new_tokens] * load.requests, Limits())
    session = Session(programs, engine.parameters, shape)
    parameters = session.parameters
    stage(f"running {load.requests} × {load.context} tokens of context")
    now = session.fill(prompts)
    state = jax.block_until_ready(session.state)
    compiled, program = compile_for(case, programs, (parameters, state, now), dump=dump, stage=stage)
    stage(f"running {load.rounds} rounds")
    for _ in range(WARM_UP):
        state = jax.block_until_ready(program(parameters, state, now))
    times = []
    for _ in range(load.rounds):
        started = time.perf_counter()
        state = jax.block_until_ready(program(parameters, state, now))
        times.append(time.perf_counter() - started)
    stage(f"tracing {load.rounds} rounds")
    with tempfile.TemporaryDirectory() as scratch:
        directory = trace or Path(scratch)
        with jax.profiler.trace(str(directory)):
            for number in range(load.rounds):
                with jax.profiler.StepTraceAnnotation("round", step_num=number):
                    state = jax.block_until_ready(program(parameters, state, now))
        stage("reading the trace")
        executions = load.rounds * machine.layout.num_devices
        parts = part_seconds(operations(directory), executions)
        if trace is not None:
            write_named(trace)
    return Live(compiled, tuple(times), parts)


class Trace:
    """A profiler trace of the second dispatch of a generation, in which nothing is compiled and no prompt is read."""

    def __init__(self, directory: Path | None):
        self._directory, self._ended = directory, 0

    def dispatched(self) -> None:
        """To be called after each dispatch."""
        self._ended += 1
        if self._directory is not None and self._ended == 1:
            jax.profiler.start_trace(str(self._directory))
        elif self._directory is not None and self._ended == 2:
            jax.profiler.stop_trace()

    def close(self) -> str:
        """Ends the trace where the text ended early, and says what there is."""
        if self._directory is None:
            return ""
        if self._ended == 1:
            jax.profiler.stop_trace()
            return "no trace: the text ended with its first dispatch; ask for more tokens"
        write_named(self._directory)
        return f"trace of one dispatch in {self._directory}, named by part in {NAMED}"


def dump_generation(
    engine: Engine,
    machine: Preset,
    gpu: str,
    programs: Programs,
    directory: Path,
    *,
    requests: int,
    context: int,
    new_tokens: int,
) -> None:
    """XLA's dump of the programs of a generation, compiled once more for it: `prefill` and `decode`, with index pages.

    Args:
      programs: those that ran.
      context: tokens of the longest prompt.
    """
    kinds: tuple[Program, ...] = ("prefill", "decode")
    parameters: Parameters = {name: engine.parameters[name] for name in programs.needs}
    for program in kinds:
        case = Case(
            engine.config, machine, card_of(engine, gpu), requests, context + new_tokens,
            budget=getattr(programs.speculation, "budget", 0),
            drafter=None if engine.drafter is None else engine.drafter.config,
            program=program, prefill_chunk=chunk_rows(context, Limits()), dtype=engine.dtype,
        )  # fmt: skip
        arguments = program_arguments(case, programs, parameters)
        compiled, _ = compile_for(case, programs, arguments, dump=directory / program)
        write_index(directory / program, compiled.text, case.title)
