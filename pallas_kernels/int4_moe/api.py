"""The operation's one public function, and the check that it computes what its specification says."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.int4_moe.plan import Implementation, Plan, Shape, Target, current_target, plan
from pallas_kernels.int4_moe.reference import int4_moe_reference
from pallas_kernels.int4_moe.routing import group_pairs
from pallas_kernels.int4_moe.tile import GROUP

# Relative Frobenius error of a kernel against the float32 reference. Rounding a value to bfloat16 has a relative error
# of 2^-9/√3 = 1.1e-3 root mean square at most; the product of gate and up is rounded once and the tensor-core engines
# also round q·scale of all three matrices. Independent errors add to at most 3.3e-3; measured 1.7e-3 and 3.1e-3.
TOLERANCE = 4e-3


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
    group_size: int = GROUP,
    num_experts: int | None = None,
    implementation: Implementation = "auto",
    target: Target | None = None,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "rows hidden"]:
    """Σ_k weight · down(silu(gate x) · up x) over the experts of each row that live here, summed in float32.

    Weights are in the checkpoint's layout (compressed-tensors, pack-quantized): word j of a row holds values 8j..8j+7,
    low nibble first, as codes q + 8; each group of 32 values has one bfloat16 scale. They are never copied.

    Args:
        x: activations; the kernels take bfloat16, the reference any float.
        expert_ids: local slot of each routed expert. An id outside 0..slots-1 means "not on this rank": it contributes
            nothing and its weights are not read.
        expert_weights: router weight of each routed expert.
        group_size: values a scale covers; only 32 exists.
        num_experts: experts the router chooses from, over all ranks (default: `slots`). It only guides tile sizes.
        implementation: "auto", or a name that must serve this call.
        target: the card to choose for; default the mesh's in use, else the first device's.
        dtype: type of the result, rounded to once at the end.
        interpret: run the kernels in Pallas's interpreter, inside `plgpu.force_gpu_interpret_mode`.

    Raises:
        ValueError: shapes or dtypes that do not belong together, or an implementation that cannot serve them.
    """
    weights = (gate_packed, gate_scale, up_packed, up_scale, down_packed, down_scale)
    shape = _check(x, expert_ids, expert_weights, weights, group_size, num_experts)
    if shape.rows == 0 or shape.top_k == 0:
        return jnp.zeros(x.shape, dtype)
    chosen = plan(shape, x.dtype, target or current_target(), implementation)
    return run(chosen, x, expert_ids, expert_weights, *weights, dtype=dtype, interpret=interpret)


def run(
    chosen: Plan,
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_packed: jax.Array,
    gate_scale: jax.Array,
    up_packed: jax.Array,
    up_scale: jax.Array,
    down_packed: jax.Array,
    down_scale: jax.Array,
    *,
    dtype: DTypeLike = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "rows hidden"]:
    """The operation as a plan says; `int4_moe` is this after checking and choosing."""
    weights = (gate_packed, gate_scale, up_packed, up_scale, down_packed, down_scale)
    if chosen.gate_up is None or chosen.down is None:
        return int4_moe_reference(x, expert_ids, expert_weights, *weights).astype(dtype)
    # Not before a kernel is wanted: Mosaic's dialects take a second to import.
    from pallas_kernels.int4_moe import matmul
    from pallas_kernels.int4_moe.registers import pair_order
    from pallas_kernels.int4_moe.rows import combine, gather

    launch = matmul.Launch(chosen.ctas, interpret)
    rows = chosen.gate_up.rows
    groups = group_pairs(expert_ids, gate_packed.shape[0], rows)
    grouped = gather(pair_order(x), groups, rows, launch)
    gated = matmul.gate_up(grouped, groups, weights[0:2], weights[2:4], chosen.gate_up, launch)
    shares = matmul.down(gated, groups, weights[4:6], chosen.down, launch)
    return combine(shares, groups, expert_weights, dtype, launch)


def _check(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    weights: tuple[jax.Array, ...],
    group_size: int,
    num_experts: int | None,
) -> Shape:
    if group_size != GROUP:
        raise ValueError(f"group_size is {group_size}: int4_moe reads groups of {GROUP} values only")
    if x.ndim != 2 or expert_ids.ndim != 2 or weights[0].ndim != 3:
        raise ValueError(
            f"x {x.shape}, expert_ids {expert_ids.shape} and gate_packed {weights[0].shape} must be [rows, hidden], "
            "[rows, top_k] and [slots, width, hidden / 8]"
        )
    (rows, hidden), top_k = x.shape, expert_ids.shape[1]
    slots, width = weights[0].shape[:2]
    if hidden % GROUP or width % GROUP:
        raise ValueError(f"hidden {hidden} and width {width} must be multiples of {GROUP}: a group may not be cut")
    for i, array in enumerate(weights):
        matrix, part = ("gate", "up", "down")[i // 2], ("packed", "scale")[i % 2]
        dtype, per = (jnp.int32, 8) if part == "packed" else (jnp.bfloat16, GROUP)
        expected = (slots, hidden, width // per) if matrix == "down" else (slots, width, hidden // per)
        if array.shape != expected or array.dtype != dtype:
            raise ValueError(
                f"{matrix}_{part} is {array.dtype}{list(array.shape)}, not {jnp.dtype(dtype).name}{list(expected)} "
                f"({slots} slots, hidden {hidden} from x, width {width} from gate_packed)"
            )
    if expert_ids.shape[0] != rows or expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_ids {expert_ids.shape} and expert_weights {expert_weights.shape} must both be [{rows}, top_k]"
        )
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(f"expert_ids is {expert_ids.dtype}, not an integer type")
    return Shape(rows, top_k, slots, hidden, width, num_experts or slots)


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """One engine compared with the reference: relative Frobenius error, and the plan that ran."""

    plan: Plan
    relative_error: float


def self_check(
    target: Target | None = None, *, device: Any = None, interpret: bool = False, seed: int = 0
) -> list[SelfCheck]:
    """Compare every engine of this card with the reference on one small problem, before anything relies on them.

    A card without kernels has nothing to check: the list is empty.

    Raises:
        RuntimeError: an engine's result is not finite or differs by more than `TOLERANCE`; do not go on.
    """
    target = target or current_target()
    if target.architecture is None:
        return []
    rng = np.random.default_rng(seed)
    rows, top_k, slots, hidden, width = 20, 2, 3, 256, 256
    operands = [
        jnp.asarray(rng.normal(size=(rows, hidden)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, slots + 1, (rows, top_k)), jnp.int32),
        jnp.asarray(rng.uniform(0.1, 1.0, (rows, top_k)), jnp.float32),
    ]
    for a, b in ((width, hidden), (width, hidden), (hidden, width)):
        operands.append(jnp.asarray(rng.integers(-(2**31), 2**31, (slots, a, b // 8)), jnp.int32))
        operands.append(jnp.asarray(rng.uniform(0.005, 0.02, (slots, a, b // GROUP)), jnp.bfloat16))
    if device is not None:
        operands = jax.device_put(operands, device)
    expected = np.asarray(jax.jit(int4_moe_reference)(*operands))
    checks = []
    engines: tuple[Implementation, ...] = ("warp", "hopper" if target.architecture == "hopper" else "blackwell")
    for implementation in engines:
        shape = Shape(rows, top_k, slots, hidden, width, slots)
        chosen = plan(shape, jnp.bfloat16, target, implementation)
        got = np.asarray(
            jax.jit(run, static_argnums=0, static_argnames="interpret")(chosen, *operands, interpret=interpret)
        )
        error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        if not error <= TOLERANCE:
            raise RuntimeError(
                f"the {implementation} INT4 kernel differs from its reference on {target.device_kind}: relative error "
                f"{error:.2e}, at most {TOLERANCE:.0e} is right; use implementation='reference' and report this"
            )
        checks.append(SelfCheck(chosen, error))
    return checks
