"""What one GPU holds: weights, latent cache, drafter."""

import math
from dataclasses import dataclass

from kimi_jax.estimator.model import Weights, cache_bytes_per_token, weight_bytes
from kimi_jax.estimator.scenario import Scenario
from meshes import expert_slots


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
        """All of it."""
        return sum(self.weights.values()) + self.cache + self.drafter + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the GPU holds it."""
        return self.total <= self.capacity


def drafter_context_bytes(s: Scenario) -> float:
    """Bytes of the drafter's keys and values of one request on one GPU: the last `window` tokens."""
    d = s.drafter
    return min(d.window, s.context) * d.cache_bytes_per_token / min(s.preset.layout.tp, d.num_kv_heads)


def memory(s: Scenario, requests: int) -> Memory:
    """What a GPU of an attention group with so many requests holds."""
    layout, m, w = s.preset.layout, s.model, Weights(s.model)
    totals = weight_bytes(m, s.precision)
    replicated = m.num_hidden_layers * w.attention_replicated * s.precision.attention_bits / 8
    slots = s.physical_slots or expert_slots(m.n_routed_experts, layout.expert_ranks)
    width = layout.tp if layout.experts == "width" else 1
    weights = {
        "attention": replicated + (totals["attention"] - replicated) / layout.tp,
        "router": totals["router"],
        "experts": totals["experts"] / m.n_routed_experts * slots / layout.expert_ranks / width,
        "shared_expert": totals["shared_expert"] / layout.tp,
        "dense": totals["dense"] / layout.tp,
        "head": totals["head"] / layout.tp,
        "embedding": totals["embedding"] / layout.tp,
    }
    draft_weights = draft_cache = 0.0
    if s.budget:
        draft_weights = s.drafter.weights * s.drafter.bytes_per_weight / layout.tp
        draft_cache = drafter_context_bytes(s)
    split = layout.tp if s.is_cache_split else 1
    per_request = s.context * cache_bytes_per_token(m, s.precision) / split
    free = s.gpu.hbm_bytes - sum(weights.values()) - draft_weights - s.constants.reserve_bytes
    most = max(0, math.floor(free / (per_request + draft_cache))) * layout.dp * layout.ep
    return Memory(
        weights, requests * per_request, draft_weights + requests * draft_cache,
        s.constants.reserve_bytes, s.gpu.hbm_bytes, most,
    )  # fmt: skip
