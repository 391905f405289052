"""The estimate of a round by its rows, as the decode loop takes it to choose how many rows pay."""

from kimi_jax.config import ModelConfig
from kimi_jax.ddtree.budget import ROW_COUNTS
from kimi_jax.decoding.automatic import RoundCosts
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.step import Estimate, estimate
from meshes import GPU, Preset


def round_costs(
    preset: Preset, gpu: GPU, model: ModelConfig, drafter: DrafterConfig, *, requests: int, context: int
) -> RoundCosts:
    """Estimated times of a round by its rows, for `requests` in the whole system.

    Args:
      preset, gpu: where the rounds run, or would run.
      context: cached tokens of a request.
    """

    def of(rows: int) -> Estimate:
        return estimate(
            make_scenario(
                preset, gpu, concurrency=requests, context=context, model=model, drafter=drafter, budget=rows - 1
            )
        )

    return RoundCosts({rows: 1e3 * of(rows).step_ms for rows in ROW_COUNTS}, "estimated")
