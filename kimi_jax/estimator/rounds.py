"""The estimate of a round by its rows, as the decode loop takes it to choose how many nodes pay."""

from kimi_jax.config import ModelConfig
from kimi_jax.ddtree.budget import ROW_COUNTS, CostTable
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.estimator.model import Drafter
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.step import Estimate, estimate
from meshes import GPU, Preset


def round_costs(
    preset: Preset, gpu: GPU, model: ModelConfig, drafter: DrafterConfig, *, requests: int, context: int
) -> CostTable:
    """Times of drafting and of verifying each compiled number of rows, for `requests` in the whole system.

    Args:
      preset, gpu: where the rounds run, or would run.
      context: cached tokens of a request.
    """
    sizes = Drafter.of(drafter)

    def of(rows: int) -> Estimate:
        return estimate(
            make_scenario(
                preset, gpu, concurrency=requests, context=context, model=model, drafter=sizes, budget=rows - 1
            )
        )

    def drafting_ms(round_: Estimate) -> float:
        return round_.parts["drafter"].ms + round_.parts["tree"].ms

    rounds = {rows: of(rows) for rows in ROW_COUNTS}
    return CostTable.measured(
        draft_us=1e3 * drafting_ms(rounds[ROW_COUNTS[-1]]),
        verify_us={rows: 1e3 * (round_.step_ms - drafting_ms(round_)) for rows, round_ in rounds.items()},
    )
