"""The operation's one public function."""

from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.int4_moe.reference import int4_moe_reference

GROUP_SIZE = 32


def int4_moe(
    x: Float[Array, "rows hidden"],
    expert_ids: Int[Array, "rows top_k"],
    expert_weights: Float[Array, "rows top_k"],
    gate_packed: Int[Array, "slots width hidden_words"],
    gate_scale: BFloat16[Array, "slots width hidden_groups"],
    up_packed: Int[Array, "slots width hidden_words"],
    up_scale: BFloat16[Array, "slots width hidden_groups"],
    down_packed: Int[Array, "slots hidden width_words"],
    down_scale: BFloat16[Array, "slots hidden width_groups"],
    *,
    group_size: int = GROUP_SIZE,
    implementation: str = "auto",
) -> Float[Array, "rows hidden"]:
    """Mixture of experts over INT4 group-32 weights, combined over each row's experts, in float32."""
    if group_size != GROUP_SIZE:
        raise ValueError(f"int4_moe reads groups of {GROUP_SIZE} weights, not {group_size}.")
    if implementation not in ("auto", "reference"):
        raise ValueError(f"unknown implementation {implementation!r}")
    return int4_moe_reference(
        x, expert_ids, expert_weights, gate_packed, gate_scale, up_packed, up_scale, down_packed, down_scale
    )
