"""How fast a card's memory and tensor cores are, by programs that do nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.int4_moe.registers import ACC, register_function
from pallas_kernels.mosaic import store

ROWS = COLUMNS = 64
WARPGROUPS, CTAS_PER_CORE = 2, 2
PRODUCTS = 32
"""`mma.sync` of a trip and warp, on eight accumulators in turn."""
ONES = 0x3F80_3F80  # bfloat16 1.0 twice


def mma_sync(
    cores: int, trips: int, interpret: plgpu.InterpretGPUParams | None = None
) -> Float[Array, "ctas warpgroup_rows columns"]:
    """Multiplies ones with warp-level `mma.sync`, from registers: every element of the result is 64 · trips."""
    acc_type = ((ROWS, COLUMNS), jnp.float32, ACC)
    multiply = register_function(_products, [ACC], [acc_type], interpret=interpret is not None)

    def kernel(out):
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        zero = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), ACC)
        acc = lax.fori_loop(0, trips, lambda _, acc: multiply(acc)[0], zero)
        store(out.at[cta, pl.ds(pl.multiple_of(wg * ROWS, ROWS), ROWS)], acc)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((cores * CTAS_PER_CORE, WARPGROUPS * ROWS, COLUMNS), jnp.float32),
        grid=(cores * CTAS_PER_CORE,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="wg",
        kernel_name="mma_sync_rate",
        interpret=interpret,
    )()


def mma_sync_operations(cores: int, trips: int) -> float:
    """Multiplications and additions of `mma_sync`."""
    warps = cores * CTAS_PER_CORE * WARPGROUPS * 4
    return 2.0 * 16 * 8 * 16 * PRODUCTS * warps * trips


def _products(ops: Any, acc: Any) -> Any:
    ones = ops.constant_word(ONES)
    out = [list(register) for register in acc]
    for _ in range(PRODUCTS // (COLUMNS // 8)):
        for block in range(COLUMNS // 8):
            low, high = out[2 * block], out[2 * block + 1]
            product = ops.mma([*low, *high], [ones] * 4, [ones] * 2)
            out[2 * block], out[2 * block + 1] = list(product[:2]), list(product[2:])
    return [out]


def matmul_operations_per_s(seconds: float, size: int) -> float:
    """Operations a second of a square product that took so long."""
    return 2.0 * size**3 / seconds
