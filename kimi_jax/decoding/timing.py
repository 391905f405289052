"""Where a round's time goes: measured, medians of repeated runs."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax

from kimi_jax.decoding.generate import Limits, prefill
from kimi_jax.decoding.programs import Programs
from kimi_jax.parameters import Parameters

REPEATS = 7


def part_seconds(
    programs: Programs, parameters: Parameters, prompts: Sequence[Sequence[int]], limits: Limits
) -> dict[str, float]:
    """Seconds of the first round behind the prompts: `draft` (drafter and tree), `verify`, `commit`.

    A part's time is the difference between programs that end after it, so what the compiler fuses across the parts'
    borders is counted where it ends.
    """
    parameters = {name: parameters[name] for name in programs.needs}
    state = prefill(programs, parameters, prompts, limits)
    draft, verified, whole = (_median(lambda run=run: run(parameters, state)) for run in programs.parts)
    return {
        "draft": draft if programs.speculation.drafter is not None else 0.0,
        "verify": max(verified - draft, 0.0) if programs.speculation.drafter is not None else verified,
        "commit": max(whole - verified, 0.0),
    }


def _median(run: Callable[[], object]) -> float:
    jax.block_until_ready(run())
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return statistics.median(times)
