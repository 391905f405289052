"""What the estimator says of a run: how many requests fit at once, and whether another layout would be faster."""

import dataclasses
from typing import Any

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.estimator.report import command
from kimi_jax.estimator.scenario import Scenario, make_scenario
from kimi_jax.estimator.search import recommend
from kimi_jax.estimator.step import estimate
from meshes import GPU, Preset

WORTH_TELLING = 1.05
"""Another layout is named where it gives this many times the speed."""


def scenario_of(
    machine: Preset, gpu: GPU, model: ModelConfig, drafter: DrafterConfig | None, *, requests: int, context: int
) -> Scenario:
    """The load of a run: `requests` at once with `context` cached tokens each."""
    known: dict[str, Any] = {} if drafter is None else {"drafter": drafter}
    return make_scenario(machine, gpu, concurrency=requests, context=context, model=model, **known)


def most_requests(scenario: Scenario) -> int:
    """Requests of this context that fit in the memory of the machine's GPUs at once.

    Raises:
      ValueError: not even one does.
    """
    memory = estimate(dataclasses.replace(scenario, concurrency=scenario.preset.layout.groups)).memory
    if memory.max_requests < 1:
        raise ValueError(
            f"no request of {scenario.context} tokens fits on {scenario.preset.name} with {scenario.gpu.name}: its "
            f"cache takes {memory.cache / 1e9:.1f} GB of a GPU, where {(memory.total - memory.cache) / 1e9:.1f} of "
            f"{memory.capacity / 1e9:.1f} GB are taken. Take a larger machine, more ep, --cache split, or shorter "
            "prompts and answers"
        )
    return memory.max_requests


def better(scenario: Scenario, rows: float) -> str | None:
    """A line that names a layout or budget that gives a user more tokens/s by the estimate; None where none does.

    Args:
      rows: that a round verified for each request, on average; 1 without drafts.
    """
    now = estimate(dataclasses.replace(scenario, budget=max(0, round(rows) - 1)))
    try:
        best = recommend(scenario.preset, scenario, "latency").best
    except ValueError:  # nothing fits by the estimate, which the run itself has just disproved
        return None
    if best.tokens_per_s_per_user < WORTH_TELLING * now.tokens_per_s_per_user:
        return None
    return (
        f"By the estimate a user would get {best.tokens_per_s_per_user:,.0f} tokens/s instead of "
        f"{now.tokens_per_s_per_user:,.0f} on {scenario.gpu.name} with: {command(best)}"
    )
