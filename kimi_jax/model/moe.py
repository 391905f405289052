"""Mixture of experts: a sigmoid router, INT4 routed experts and one shared expert (DeepSeek-V3, arXiv 2412.19437)."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.config import ModelConfig
from kimi_jax.model.layers import GatedMLP
from kimi_jax.parallel.counters import report_loads
from kimi_jax.parallel.exchange import Exchange
from kimi_jax.parallel.placement import Placement, PlacementTable
from kimi_jax.parameters import int4_stack, weight
from kimi_jax.quantization import Int4Weight
from pallas_kernels.int4_moe import int4_moe


class Router(nnx.Module):
    """Picks top-k experts by sigmoid score plus correction bias; the weights come from the scores alone.

    Computed in float32 whatever the model's type: with bfloat16 weights the products are exact and only the sum rounds.
    The bias stays float32 to the bit (it decides ties of 1e-3).
    """

    def __init__(self, config: ModelConfig):
        self.weight = weight((config.n_routed_experts, config.hidden_size), (None, None))
        self.e_score_correction_bias = weight((config.n_routed_experts,), (None,), jnp.float32)
        self.config = config

    def __call__(self, x: Float[Array, "rows hidden"]) -> tuple[Int[Array, "rows top_k"], Float[Array, "rows top_k"]]:
        """Expert ids and their weights, normalised to sum to `routed_scaling_factor`."""
        logits = jnp.einsum(
            "rh,eh->re", x, self.weight[...], precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        scores = jax.nn.sigmoid(logits)
        _, experts = jax.lax.top_k(scores + self.e_score_correction_bias[...], self.config.num_experts_per_tok)
        chosen = jnp.take_along_axis(scores, experts, axis=-1)
        weights = chosen / (chosen.sum(-1, keepdims=True) + 1e-20) * self.config.routed_scaling_factor
        return experts, weights


class Experts(nnx.Module):
    """The routed experts of one layer, stacked by slot; a rank holds its own slots."""

    def __init__(self, config: ModelConfig, slots: int):
        hidden, width, group = config.hidden_size, config.moe_intermediate_size, config.quantization_group_size
        self.gate_proj = int4_stack(slots, (width, hidden), ("expert_mlp", None), group)
        self.up_proj = int4_stack(slots, (width, hidden), ("expert_mlp", None), group)
        self.down_proj = int4_stack(slots, (hidden, width), (None, "expert_mlp"), group)
        self.num_experts = config.n_routed_experts

    @property
    def num_local(self) -> int:
        """Slots this rank holds."""
        return _int4(self.gate_proj).packed.shape[0]

    def __call__(
        self,
        x: Float[Array, "rows hidden"],
        slots: Int[Array, "rows top_k"],
        weights: Float[Array, "rows top_k"],
        routed_rows: int | None = None,
    ) -> Float[Array, "rows hidden"]:
        """Weighted sum over the slots this rank holds; other ids contribute nothing. See `LocalExperts`."""
        projections = (_int4(projection) for projection in (self.gate_proj, self.up_proj, self.down_proj))
        return int4_moe(
            x, slots, weights, *projections, num_experts=self.num_experts, routed_rows=routed_rows, dtype=x.dtype
        )


class RoutedExperts(Protocol):
    """What a mixture needs of its routed experts; training has float ones, everything else the INT4 stack."""

    @property
    def num_local(self) -> int:
        """Slots this rank holds."""
        ...

    def __call__(self, x: Array, slots: Array, weights: Array, /, routed_rows: int | None = None) -> Array:
        """Weighted sum over the slots this rank holds."""
        ...


MakeExperts = Callable[[ModelConfig, int], RoutedExperts]
"""Configuration and number of slots to the routed experts of one layer."""


def _int4(parameter: nnx.Param) -> Int4Weight:
    value = parameter.get_value()
    assert isinstance(value, Int4Weight)
    return value


def _counts(experts: Int[Array, "rows top_k"], real: Bool[Array, "rows 1"], num_experts: int) -> Int[Array, " experts"]:
    return jnp.zeros(num_experts, jnp.int32).at[experts].add(jnp.broadcast_to(real, experts.shape).astype(jnp.int32))


class MixtureOfExperts(nnx.Module):
    """Routed experts wherever they are, plus the shared expert, which is neither gated nor scaled.

    A program that moves experts sets `placement` to a table of its arguments; otherwise it is part of the program.
    """

    def __init__(self, config: ModelConfig, placement: Placement, exchange: Exchange, make_experts: MakeExperts):
        self.gate = Router(config)
        self.experts = make_experts(config, placement.num_slots)
        self.shared_experts = GatedMLP(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)
        self.placement: Placement | PlacementTable = placement
        self.exchange = exchange

    def __call__(self, x: Float[Array, "rows hidden"], valid: Bool[Array, " rows"]) -> Float[Array, "rows hidden"]:
        """This tp rank's part of the output, to be summed over tp; padding rows are routed nowhere."""
        real = valid[:, None]
        with jax.named_scope("router"):
            experts, weights = self.gate(x)
            slots = self.placement.slots_of(experts)
            slots = jnp.where(real, slots, self.placement.num_slots)
            report_loads(lambda: _counts(experts, real, self.gate.config.n_routed_experts))
        with jax.named_scope("experts"):
            routed = self.exchange(x, slots, weights, self.experts, self.experts.num_local)
        with jax.named_scope("shared_expert"):
            return routed + self.shared_experts(x)
