"""`estimate.py serve`: whole requests through the engine's scheduler, at the estimated costs."""

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kimi_jax.commands.options import Count
from kimi_jax.commands.progress import bar_on
from kimi_jax.commands.scenario import Place
from kimi_jax.estimator import report, search, step
from kimi_jax.estimator.serving import ACCEPTANCE_SIGMA, Machine, Outcome, disaggregated, simulate
from kimi_jax.serving.arrivals import Lengths, poisson
from kimi_jax.tables import left, right, table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(Place):
    """Options of `serve`."""

    budget: int = 8
    """Draft nodes of a request's tree; 0 decodes without a draft."""
    rate: float | None = None
    """Requests that arrive each second, independently of each other; without it --batch clients send their next
    request as one ends."""
    requests: int = 1000
    """Requests that are simulated, the first tenth of them to fill the machine."""
    prompt: int = 4096
    """Tokens of the median prompt."""
    answer: int = 512
    """Tokens of the median answer."""
    sigma: float = 0.5
    """Deviation of the logarithms of both lengths; 0 makes all alike."""
    shared_prefix: int = 0
    """Tokens that all prompts begin with, found in kept pages after the first."""
    acceptance_sigma: float = ACCEPTANCE_SIGMA
    """Deviation of requests' accepted draft tokens over their mean."""
    max_slots: Count = None
    """Requests at work together in the whole machine; by default --batch, or with --rate what fits in memory, 64 for
    each device group at most."""
    prefill_machines: int = 0
    """Further machines of the same kind that only prefill; 0 runs prompts beside the rounds."""
    ttft: float = 2.0
    """Seconds to the first token that a good request keeps to."""
    least_speed: float = 20.0
    """Tokens/s after it that a good request has at least."""
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer at most: twice the medians where they spread."""
        return (2 if self.sigma else 1) * (self.prompt + self.answer)


def run_serve(options: ServeOptions) -> None:
    """Whole requests: time to the first token, speed, queue and goodput under a rate or a number of clients."""
    layout = options.layout.preset()
    scenario = options.scenario(layout, options.gpu, options.budget)
    scenario = dataclasses.replace(scenario, context=options.longest)
    slots = options.max_slots or options.batch
    if options.rate is not None and options.max_slots is None:
        groups = layout.layout.groups
        fit = step.estimate(dataclasses.replace(scenario, concurrency=groups)).memory.max_requests
        slots = max(groups, min(fit, 64 * groups))
    machine = Machine.of(scenario, slots, options.longest, options.chunk)
    spread = 2 if options.sigma else 1
    prompts = Lengths(options.prompt, options.sigma, spread * options.prompt)
    answers = Lengths(options.answer, options.sigma, spread * options.answer)
    arrivals = poisson(options.requests, options.rate, prompts, answers, options.seed)
    shared: dict[str, Any] = {"acceptance_sigma": options.acceptance_sigma, "seed": options.seed}
    with bar_on(Console(stderr=True, quiet=options.json)) as bar:
        task = bar.add_task("served", total=len(arrivals))
        shared["progress"] = lambda done: bar.update(task, completed=done)
        if options.prefill_machines:
            if options.rate is None or options.shared_prefix:
                raise ValueError("--prefill-machines takes prompts by --rate, and none of them from kept pages")
            outcome = disaggregated(machine, scenario, arrivals, options.prefill_machines, **shared)
        else:
            clients = options.batch if options.rate is None else None
            outcome = simulate(machine, arrivals, in_flight=clients, shared_prefix=options.shared_prefix, **shared)
    place = f"{layout.name} with {scenario.gpu.name}: {search.describe(layout.layout)}"
    data = {"mesh": layout.name, "gpu": scenario.gpu.name, "layout": search.describe(layout.layout), "slots": slots}
    data |= {"budget": options.budget, "rate": options.rate} | summary(outcome, options.ttft, options.least_speed)
    text = answer(place, outcome, options)
    report.output(options.json, lambda: data, *text, latency_table(outcome))


PERCENTILES = (50, 90, 99)


def summary(outcome: Outcome, ttft: float, speed: float) -> dict[str, Any]:
    """An outcome as plain data; times are seconds."""
    figures = {name: getattr(outcome, name) for name in ("gpus", "tokens_per_s", "busy", "requests", "queued")}
    figures |= {"tokens_per_s_per_gpu": outcome.tokens_per_s / outcome.gpus, "preemptions": outcome.preemptions}
    figures |= {"reused": outcome.reused, "goodput": outcome.goodput(ttft, speed)}
    for name in ("ttft", "tpot"):
        figures[f"{name}_mean"] = outcome.mean(name)
        figures |= {f"{name}_p{percent}": outcome.percentile(name, percent) for percent in PERCENTILES}
    return figures


def answer(place: str, outcome: Outcome, options: ServeOptions) -> list[str | Text]:
    """An outcome in a few short lines."""
    good = outcome.goodput(options.ttft, options.least_speed)
    load = f"for {options.batch} clients" if options.rate is None else f"at {options.rate:g} requests a second"
    lines: list[str | Text] = [
        place,
        f"Speed: {report.number(outcome.tokens_per_s)} tokens/s in all, "
        f"{report.number(outcome.tokens_per_s / outcome.gpus)} a GPU, {load}.",
        f"Goodput: {good:.0%} of the requests had their first token within {options.ttft:g} s and then at least "
        f"{options.least_speed:g} tokens/s.",
        f"Load: {outcome.requests:.0f} requests at work, {outcome.queued:.1f} waiting; busy {outcome.busy:.0%} of the "
        "time.",
    ]
    if options.rate is not None and outcome.queued > max(2.0, outcome.requests):
        lines.append("More requests arrive than the machine serves: the times grow with the number of requests.")
    return lines


def latency_table(outcome: Outcome) -> Table:
    """Percentiles of the first token's time and of the speed after it."""
    rows = [
        ("first token, s", *(f"{outcome.percentile('ttft', percent):.2f}" for percent in PERCENTILES)),
        ("ms a token", *(f"{1e3 * outcome.percentile('tpot', percent):.1f}" for percent in PERCENTILES)),
        (
            "tokens/s",
            *(report.number(1 / (outcome.percentile("tpot", percent) or math.inf)) for percent in PERCENTILES),
        ),
    ]
    return table("Of requests", (*left(""), *right("half", "90 %", "99 %")), rows, caption="within these")
