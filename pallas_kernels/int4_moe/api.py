"""The operation's one public function, and what it is under the contract of `pallas_kernels.operation`."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.int4_moe import selection
from pallas_kernels.int4_moe.reference import PackedWeight, int4_moe_reference
from pallas_kernels.int4_moe.selection import Shape
from pallas_kernels.int4_moe.shapes import CASES, CHECKS, SHAPES, necessary, problem
from pallas_kernels.int4_moe.tile import GROUP
from pallas_kernels.operation import Device, Operation, Tolerance

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu

# Rounding a value to bfloat16 has a relative error of 2^-9/√3 = 1.1e-3 root mean square at most; the product of gate
# and up is rounded once and the tensor-core engines also round q·scale of all three matrices. Independent errors add to
# at most 3.3e-3; measured 1.7e-3 and 3.1e-3. The largest of half a million such errors is five times that.
TOLERANCE = Tolerance(frobenius=4e-3, largest=2**-5)


def int4_moe(
    x: Float[Array, "rows hidden"],
    expert_ids: Int[Array, "rows top_k"],
    expert_weights: Float[Array, "rows top_k"],
    gate: PackedWeight,
    up: PackedWeight,
    down: PackedWeight,
    *,
    num_experts: int | None = None,
    routed_rows: int | None = None,
    implementation: str = "auto",
    device: Device | None = None,
    dtype: DTypeLike = jnp.float32,
    interpret: "plgpu.InterpretGPUParams | None" = None,
) -> Float[Array, "rows hidden"]:
    """Σ_k weight · down(silu(gate x) · up x) over the experts of each row that live here, summed in float32.

    A weight is anything with `packed` and `scale` in the checkpoint's layout (compressed-tensors, pack-quantized):
    `packed` int32 [slots, out, in / 8], of which word j of a row holds values 8j..8j+7, low nibble first, as codes
    q + 8; `scale` bfloat16 [slots, out, in / 32], one for each group of 32 values. They are never copied.

    Args:
        x: activations; the kernels take bfloat16, the reference any float.
        expert_ids: local slot of each routed expert. An id outside 0..slots-1 means "not on this rank": it contributes
            nothing and its weights are not read.
        expert_weights: router weight of each routed expert.
        gate: [slots, width, hidden], as are the two others but for their order.
        up: [slots, width, hidden].
        down: [slots, hidden, width].
        num_experts: experts the router chooses from, over all ranks (default: `slots`). It only guides tile sizes.
        routed_rows: rows that chose from them (default: those of `x`, which may be a buffer with more or less room).
            It only guides tile sizes too.
        implementation: "auto", "reference", or a name of `selection.IMPLEMENTATIONS` that must serve this call.
        device: the card to choose for; default the mesh's in use, else the first device's.
        dtype: type of the result, rounded to once at the end.
        interpret: run the kernels in Pallas's interpreter, on a CPU.

    Raises:
        ValueError: shapes or dtypes that do not belong together, or an implementation that cannot serve them.
    """
    shape = _check(x, expert_ids, expert_weights, (gate, up, down), num_experts)
    shape = dataclasses.replace(shape, routed_rows=routed_rows or 0)
    if shape.rows == 0 or shape.top_k == 0:
        return jnp.zeros(x.shape, dtype)
    choice = OPERATION.choose(shape, x.dtype, device or Device.current(), implementation)
    return OPERATION.run(choice, x, expert_ids, expert_weights, gate, up, down, dtype=dtype, interpret=interpret)


def _check(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    weights: tuple[PackedWeight, PackedWeight, PackedWeight],
    num_experts: int | None,
) -> Shape:
    packed = weights[0].packed
    if x.ndim != 2 or expert_ids.ndim != 2 or packed.ndim != 3:
        raise ValueError(
            f"x {x.shape}, expert_ids {expert_ids.shape} and gate.packed {packed.shape} must be [rows, hidden], "
            "[rows, top_k] and [slots, width, hidden / 8]"
        )
    (rows, hidden), top_k = x.shape, expert_ids.shape[1]
    slots, width = packed.shape[:2]
    if hidden % GROUP or width % GROUP:
        raise ValueError(f"hidden {hidden} and width {width} must be multiples of {GROUP}: a group may not be cut")
    for name, weight in zip(("gate", "up", "down"), weights, strict=True):
        out, into = (hidden, width) if name == "down" else (width, hidden)
        for part, dtype, per in (("packed", jnp.int32, 8), ("scale", jnp.bfloat16, GROUP)):
            array, expected = getattr(weight, part), (slots, out, into // per)
            if array.shape != expected or array.dtype != dtype:
                raise ValueError(
                    f"{name}.{part} is {array.dtype}{list(array.shape)}, not {jnp.dtype(dtype).name}{list(expected)} "
                    f"({slots} slots, hidden {hidden} from x, width {width} from gate.packed, groups of {GROUP})"
                )
    if expert_ids.shape[0] != rows or expert_weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_ids {expert_ids.shape} and expert_weights {expert_weights.shape} must both be [{rows}, top_k]"
        )
    if not jnp.issubdtype(expert_ids.dtype, jnp.integer):
        raise ValueError(f"expert_ids is {expert_ids.dtype}, not an integer type")
    return Shape(rows, top_k, slots, hidden, width, num_experts or slots)


OPERATION = Operation(
    name="int4_moe",
    reference=int4_moe_reference,
    implementations=selection.IMPLEMENTATIONS,
    prefer=selection.prefer,
    describe=selection.describe,
    problem=problem,
    tolerances=(TOLERANCE,),
    necessary=necessary,
    read_in_place=(3, 4, 5),
    shapes=SHAPES,
    cases=CASES,
    checks=CHECKS,
)
