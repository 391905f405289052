"""`benchmark.py serve`: requests through the engine's slots, all at once or as they come, here or over HTTP."""

import asyncio
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console

from kimi_jax.commands.options import DrafterOptions, Flag, Json, OptionalFile, option
from kimi_jax.commands.progress import bar_on, open_engine
from kimi_jax.tables import left, right, show, table

if TYPE_CHECKING:
    from kimi_jax.evaluation.arrivals import Arrival, Target
    from kimi_jax.evaluation.queueing import Load
    from kimi_jax.opening import Opened

Way = Literal["none", "chain", "ddtree", "http"]


@dataclasses.dataclass(frozen=True)
class ServeOptions(DrafterOptions):
    """Options of `serve`."""

    requests: int = 200
    """Requests, with answers of log-normal lengths; by default all are there from the start."""
    slots: int = 8
    """Requests at work at the same time."""
    median: int = 40
    """New tokens of the median answer."""
    sigma: float = 0.8
    """Deviation of the logarithms of the answers' lengths."""
    budget: int = 0
    """Tree nodes of a round; 0 decodes plainly."""
    static: Flag = False
    """Also serve them in static batches, each of which ends with its longest answer."""
    ways: Annotated[tuple[Way, ...], option("WAY ...")] = ()
    """Replay requests as they come, with times to tokens: without drafts, with chains, with trees of --budget nodes, or
    over HTTP without drafts, one after the other."""
    rate: Annotated[float | None, option("X")] = None
    """Requests a second on average, with --ways; by default all come at once."""
    clients: Annotated[int | None, option("N")] = None
    """Requests under way at most, with --ways or --url."""
    trace: OptionalFile = None
    """Requests of a file, one a line: {"at": seconds, "prompt_tokens": n, "max_tokens": n, "session": name}; the
    prompts of a session grow by its answers."""
    url: Annotated[str | None, option("URL")] = None
    """Replay against a server that runs at http://HOST:PORT, and open no checkpoint here."""
    first_goal: float = 1.0
    """Seconds to the first token that a good request takes at most."""
    next_goal: float = 0.05
    """Seconds between tokens that a good request takes at most, on average."""
    synthetic_acceptance: Annotated[float | None, option("TOKENS")] = None
    """Pretend this mean acceptance length for chains and trees."""
    json: Json = False


def serve(options: ServeOptions) -> None:
    """A queue of requests through the engine's slots: slots in use, tokens/s, times to tokens."""
    if options.rate is not None and not options.rate > 0:
        raise ValueError(f"--rate is {options.rate}; it must be positive")
    if options.ways or options.url or options.trace:
        _replay(options)
    else:
        _all_at_once(options)


def _load(options: ServeOptions) -> "Load":
    from kimi_jax.evaluation.queueing import Load

    return Load(options.requests, options.slots, median=options.median, sigma=options.sigma)


def _all_at_once(options: ServeOptions) -> None:
    status = Console(stderr=True, soft_wrap=True, quiet=options.json)
    drafter = options.known_drafter(status) if options.budget else None
    opened = open_engine(options, status, drafter)

    from kimi_jax.decoding.engine import PLAIN, Draft
    from kimi_jax.evaluation.queueing import measure
    from kimi_jax.evaluation.runs import record

    load = _load(options)
    draft = Draft("ddtree", options.budget) if options.budget else PLAIN
    with bar_on(status) as bar:
        task = bar.add_task("tokens", total=None)
        found = measure(opened.engine, load, draft, static=options.static, progress=lambda new: bar.advance(task, new))
    rows = [each.as_dict(found[0]) for each in found]
    ran = f"{load.requests} requests, {load.slots} slots, answers of {load.median} tokens (σ {load.sigma})"
    if options.json:
        print(json.dumps(record("serve", f"{ran}; {opened.where}", rows)))
        return
    names = ("tokens", "rounds", "slots in use", "tokens/s", "speed-up")
    cells = [
        (each["way"], f"{each['tokens']:,}", f"{each['rounds']:,}", f"{each['slot_use']:.0%}",
         f"{each['tokens_per_second']:,.0f}", f"{each['speed_up']:.2f}×")
        for each in rows
    ]  # fmt: skip
    last = rows[-1]
    show(
        f"{last['tokens_per_second']:,.0f} tokens/s with {last['slot_use']:.0%} of the slots in use; {opened.where}.",
        table(ran, (*left("way"), *right(*names)), cells),
    )


def _replay(options: ServeOptions) -> None:
    from kimi_jax.evaluation.arrivals import OverHttp, poisson, read_trace
    from kimi_jax.evaluation.runs import record

    status = Console(stderr=True, soft_wrap=True, quiet=options.json)
    if options.trace is not None:
        arrivals, ran = read_trace(options.trace), f"{options.trace.name}"
    else:
        load, rate = _load(options), options.rate or math.inf
        limits = [request.max_new_tokens for request in load.draw(512)]
        arrivals = poisson(rate, [load.prompt] * load.requests, limits)
        ran = f"{load.requests} requests" + (f", {rate:g} a second" if options.rate else "")
    ran += f", {options.clients} clients" if options.clients else ""
    if options.url is not None:
        rows = [asyncio.run(_measured("http", OverHttp(options.url), arrivals, options))]
        ran += f"; {options.url}"
    else:
        drafter = options.known_drafter(status) if {"chain", "ddtree"} & {*options.ways} else None
        opened = open_engine(options, status, drafter)
        rows = []
        for way in options.ways or ("none",):
            with status.status(f"{way}: {len(arrivals)} requests"):
                rows.append(asyncio.run(_served(way, opened, arrivals, options)))
        ran += f", {options.slots} slots; {opened.where}"
    if options.json:
        print(json.dumps(record("arrivals", ran, rows)))
        return
    from kimi_jax.evaluation.arrivals import COLUMNS

    best = max(rows, key=lambda row: row["tokens_per_second"])
    cells = [["" if row[name] is None else _cell(row[name]) for name in COLUMNS] for row in rows]
    names = [*COLUMNS.values()]
    lines = [f"{best['tokens_per_second']:,.0f} tokens/s: {best['way']}; {ran}."]
    by_way = {row["way"]: row["tokens_per_second"] for row in rows}
    if {"http", "none"} <= by_way.keys():
        lines.append(f"Over HTTP {by_way['http'] / by_way['none']:.2f} × the engine fed directly.")
    show(*lines, table("", (*left(names[0]), *right(*names[1:])), cells))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


async def _served(way: Way, opened: "Opened", arrivals: Sequence["Arrival"], options: ServeOptions) -> dict[str, Any]:
    """Replays requests on a server of this process: its queue fed directly, or over HTTP from another process."""
    from kimi_jax.decoding.engine import PLAIN, Draft
    from kimi_jax.evaluation.arrivals import InProcess
    from kimi_jax.server.run import listen, serve
    from kimi_jax.server.start import Serving, app_on

    budget = options.budget or "auto"
    draft = PLAIN if way in ("none", "http") else Draft(way, budget, synthetic=options.synthetic_acceptance)
    longest = max(len(arrival.ids) + arrival.limit for arrival in arrivals)
    serving = Serving("benchmark", options.slots, longest, len(arrivals), draft=draft, warm_up="none")
    app = app_on(opened.engine, opened.folder, serving)
    if way != "http":
        app.loop.start()
        await app.loop.opened()
        found = await _measured(way, InProcess(app), arrivals, options)
        await app.loop.stop()
        return found
    listener = listen("127.0.0.1", 0)
    serving_ = asyncio.create_task(serve(app, listener))
    await app.loop.opened()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    found = await asyncio.to_thread(from_another_process, url, arrivals, options)
    app.draining = True
    await serving_
    return found


def from_another_process(url: str, arrivals: Sequence["Arrival"], options: ServeOptions) -> dict[str, Any]:
    """Measures over HTTP without taking the server's time."""
    name = f"from {__name__} import answer; answer()"
    given = pickle.dumps((url, arrivals, options))
    done = subprocess.run([sys.executable, "-c", name], input=given, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the clients have failed: {done.stderr.decode().strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def answer() -> None:
    """Measures over HTTP what standard input says, for `from_another_process`."""
    from kimi_jax.evaluation.arrivals import OverHttp

    url, arrivals, options = pickle.load(sys.stdin.buffer)
    print(json.dumps(asyncio.run(_measured("http", OverHttp(url), arrivals, options))))


async def _measured(
    way: str, target: "Target", arrivals: Sequence["Arrival"], options: ServeOptions
) -> dict[str, Any]:  # fmt: skip
    """Replays requests once in part, which compiles, and then all."""
    from kimi_jax.evaluation.arrivals import Goal, replay, summary

    first = [dataclasses.replace(arrival, at=0.0) for arrival in arrivals[: 2 * options.slots]]
    await replay(target, first, options.clients)
    before = await target.figures()
    felt, seconds = await replay(target, arrivals, options.clients)
    goal = Goal(options.first_goal, options.next_goal)
    return summary(way, felt, seconds, before, await target.figures(), goal)
