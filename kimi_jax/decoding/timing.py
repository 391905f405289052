"""Where a round's time goes: measured, medians of repeated runs."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax

from kimi_jax.ddtree.budget import ROW_COUNTS
from kimi_jax.decoding.automatic import RoundCosts
from kimi_jax.decoding.generate import Limits, shape_of
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.session import Session
from kimi_jax.parallel import host_arrays
from kimi_jax.parameters import Parameters
from kimi_jax.serving.plan import Plan

REPEATS = 7
DEAREST_GROWTH = 1.5
"""A larger tree is measured only where a straight line through the last two foretells a round no dearer than this many
times the last: doubled rows bring about a tenth more tokens."""


def measure_rounds(
    plain: Programs, drafting: Programs, parameters: Parameters, requests: int, longest: int, most: int
) -> RoundCosts:
    """Times a round of each row count that may pay, in slots whose prompts have been run; process 0's times count.

    Dispatches are those that decoding makes for as many requests, so nothing is compiled that it would not use.

    Args:
      plain, drafting: programs without drafts, for one row, and those with them, for more.
      longest, most: tokens of the longest prompt and of the longest answer.
    """
    limits = Limits(max_new_tokens=most)

    def seconds(programs: Programs) -> float:
        session = Session(programs, parameters, shape_of(programs, [longest] * requests, [most] * requests, limits))
        plan = Plan(0, rounds=session.shape.rounds[-1], active=session.slots_in_turn(requests))
        times = []
        for _ in range(REPEATS + 1):
            # What the pages hold does not matter; the last token alone makes the slots ready.
            session.fill([[0] * longest] * requests, cached=longest - 1)
            jax.block_until_ready(session.state)
            started = time.perf_counter()
            snapshot = session.run(plan).read()
            times.append((time.perf_counter() - started) / max(int(snapshot.round_tokens[:, 0].max()), 1))
        return min(times[1:])  # the first compiles

    times: dict[int, float] = {}
    for rows in ROW_COUNTS:
        if len(times) > 1:
            (before, less), (last, longer) = [*times.items()][-2:]
            if longer + (longer - less) / (last - before) * (rows - last) > DEAREST_GROWTH * longer:
                break
        times[rows] = host_arrays.of_process_0(seconds(plain if rows == 1 else drafting.with_rows(rows)))
    return RoundCosts({rows: 1e6 * time for rows, time in times.items()}, "measured")


def part_seconds(
    programs: Programs, parameters: Parameters, prompts: Sequence[Sequence[int]], most: int
) -> dict[str, float]:
    """Seconds of the first round behind the prompts: `draft` (drafter and tree), `verify`, `commit`.

    A part's time is the difference between programs that end after it, so what the compiler fuses across the parts'
    borders is counted where it ends. The answers' room is for `most` tokens.
    """
    lengths = [*map(len, prompts)]
    shape = shape_of(programs, lengths, [most] * len(prompts), Limits(max_new_tokens=most))
    session = Session(programs, parameters, shape)
    now = session.fill(prompts)
    draft, verified, whole = (
        _median(lambda run=run: run(session.parameters, session.state, now)) for run in programs.parts
    )
    drafts = programs.speculation.drafter is not None
    return {
        "draft": draft if drafts else 0.0,
        "verify": max(verified - draft, 0.0) if drafts else verified,
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
