"""What one GPU holds: weights, latent cache, drafter."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kimi_jax.estimator.scenario import Scenario

if TYPE_CHECKING:
    from kimi_jax.ledger.step import Need


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: dict[str, float]
    cache: float
    drafter: float
    reserve: float
    capacity: float
    max_requests: int
    """Requests in the whole system that fit at this context."""

    @property
    def total(self) -> float:
        """Bytes of everything together."""
        return sum(self.weights.values()) + self.cache + self.drafter + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the GPU holds it."""
        return self.total <= self.capacity


def memory(s: Scenario, needs: "dict[str, Need]") -> Memory:
    """What a GPU of the fullest attention group holds, from the step's ledger."""
    layout = s.preset.layout
    requests = max(layout.group_requests(s.concurrency), 1)
    weights = {part: need.weights for part, need in needs.items() if need.weights and part != "drafter"}
    cache, draft = needs["attention"].cache, needs["drafter"]
    free = s.gpu.hbm_bytes - sum(weights.values()) - draft.weights - s.constants.reserve_bytes
    each = (cache + draft.cache) / requests  # 0 for a step that only prefills
    most = max(0, math.floor(free / each)) * layout.groups if each else 0
    return Memory(weights, cache, draft.weights + draft.cache, s.constants.reserve_bytes, s.gpu.hbm_bytes, most)
