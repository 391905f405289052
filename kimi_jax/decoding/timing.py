"""Where a round's time goes: measured, medians of repeated runs."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kimi_jax.ddtree.budget import ROW_COUNTS
from kimi_jax.decoding.automatic import RoundCosts
from kimi_jax.decoding.generate import Limits, prefill, start
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.sampling import request_keys
from kimi_jax.parallel import host_arrays
from kimi_jax.parallel.sharding import REQUESTS
from kimi_jax.parameters import Parameters

REPEATS = 7
DEAREST_GROWTH = 1.5
"""A larger tree is measured only where a straight line through the last two foretells a round no dearer than this many
times the last: doubled rows bring about a tenth more tokens."""


def measure_rounds(
    plain: Programs, drafting: Programs, parameters: Parameters, requests: int, longest: int, limits: Limits
) -> RoundCosts:
    """Times a round of each row count that may pay, on empty texts of `longest` tokens; process 0's times count.

    Dispatches are those that `generate` makes for as many prompts, so nothing is compiled that decoding would not use.

    Args:
      plain, drafting: programs without drafts, for one row, and those with them, for more.
    """
    padded = -(-requests // plain.request_multiple) * plain.request_multiple
    keys, budgets = request_keys([0] * padded, [0] * padded), [limits.max_new_tokens] * padded

    def seconds(programs: Programs) -> float:
        needed: Parameters = {name: parameters[name] for name in programs.needs}
        lengths = host_arrays.place(np.full(padded, longest, np.int32), programs.mesh, REQUESTS)
        state = dataclasses.replace(start(programs, keys, budgets, longest, limits), lengths=lengths)
        state = jax.block_until_ready(state)
        started = time.perf_counter()
        _, snapshot = programs.decode(needed, state, np.int32(limits.rounds_per_dispatch))
        rounds = int(snapshot.rounds.max())
        return (time.perf_counter() - started) / max(rounds, 1)

    times: dict[int, float] = {}
    for rows in ROW_COUNTS:
        if len(times) > 1:
            (before, less), (last, most) = [*times.items()][-2:]
            if most + (most - less) / (last - before) * (rows - last) > DEAREST_GROWTH * most:
                break
        programs = plain if rows == 1 else drafting.with_rows(rows)
        seconds(programs)  # compiles
        times[rows] = host_arrays.of_process_0(min(seconds(programs) for _ in range(REPEATS)))
    return RoundCosts({rows: 1e6 * time for rows, time in times.items()}, "measured")


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
