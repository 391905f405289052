"""The grouped product of one call: a persistent kernel whose work list is the active tiles, around three engines.

A CTA is `warpgroups` computing warpgroups and one that loads. Each computing warpgroup owns two *units* of 64 weight
rows: for gate and up, the same 64 features of both; for down, two runs of 64 outputs. A work item is one tile of
grouped rows times one block of weight rows (times one share of k). The loader streams the stages of all its CTA's items
through a ring without a gap between items. Weights are the left operand, unpacked in registers; activations the right.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.int4_moe import registers
from pallas_kernels.int4_moe.blackwell import Blackwell
from pallas_kernels.int4_moe.engine import Engine
from pallas_kernels.int4_moe.hopper import Hopper
from pallas_kernels.int4_moe.reference import PackedWeight
from pallas_kernels.int4_moe.registers import register_function
from pallas_kernels.int4_moe.routing import Groups
from pallas_kernels.int4_moe.tile import GROUP, UNIT, EngineName, Kind, Tile
from pallas_kernels.int4_moe.warp import Warp
from pallas_kernels.mosaic import store, swizzled

_ENGINES: dict[EngineName, type[Engine]] = {"warp": Warp, "hopper": Hopper, "blackwell": Blackwell}


@dataclasses.dataclass(frozen=True)
class Launch:
    """How many persistent CTAs, and the interpreter's parameters where it runs them."""

    ctas: int
    interpret: plgpu.InterpretGPUParams | None = None


def gate_up(
    x: BFloat16[Array, "grouped hidden"],
    groups: Groups,
    gate: PackedWeight,
    up: PackedWeight,
    tile: Tile,
    launch: Launch,
) -> BFloat16[Array, "grouped width"]:
    """silu(gate x) · up x of every active tile, in pair order, from activations in pair order.

    With `tile.split` > 1 the shares are summed and the activation applied outside the kernel.
    """
    width = gate.packed.shape[1]
    if tile.split == 1:
        return _grouped(x, groups, (gate, up), tile, launch, "gate_up")
    partial = jnp.sum(_grouped(x, groups, (gate, up), tile, launch, "gate_up"), axis=0)
    return registers.pair_order((jax.nn.silu(partial[:, :width]) * partial[:, width:]).astype(jnp.bfloat16))


def down(
    x: BFloat16[Array, "grouped width"], groups: Groups, weights: PackedWeight, tile: Tile, launch: Launch
) -> Float[Array, "split grouped hidden"]:
    """Every active tile times its expert's down projection, in shares of k, from activations in pair order."""
    return _grouped(x, groups, (weights, weights), tile, launch, "down")


def _grouped(
    x: jax.Array, groups: Groups, units: tuple[PackedWeight, PackedWeight], tile: Tile, launch: Launch, kind: Kind
) -> jax.Array:
    n, wgs, k_step, stages, split = tile.rows, tile.warpgroups, tile.k_step, tile.stages, tile.split
    grouped, k = x.shape
    out_rows = units[0].packed.shape[1]
    block = UNIT * wgs  # weight rows of one unit across the CTA
    m_rows = block if kind == "gate_up" else 2 * block  # weight rows a work item takes from one matrix
    m_blocks, k_steps = out_rows // m_rows, k // k_step // split
    step_groups, words = k_step // GROUP, k_step // 8
    assert out_rows % m_rows == 0, (out_rows, m_rows)
    assert k_steps * split * k_step == k, (k, k_step, split)
    # A row's scales of one step are a box of the matrix if they fill the 16 bytes a bulk copy needs; otherwise the
    # step spans the row, and the scales of consecutive rows are one contiguous run.
    flat_scales = step_groups < 8
    assert not flat_scales or k_step == k, (k_step, k)
    scale_rows, scale_columns = registers.scale_shape(block, step_groups)
    scales = [unit.scale.reshape(unit.scale.shape[0], -1, 8) if flat_scales else unit.scale for unit in units]
    fused = kind == "gate_up" and split == 1
    out_dtype = jnp.dtype("bfloat16") if fused else jnp.dtype("float32")
    out_columns = 2 * out_rows if kind == "gate_up" and not fused else out_rows
    out_type = jax.ShapeDtypeStruct((grouped, out_columns) if fused else (split, grouped, out_columns), out_dtype)
    engine = _ENGINES[tile.engine](tile, launch.interpret is not None)
    out_layout = registers.PAIR_OUT if fused else registers.OUT
    as_output = register_function(
        registers.single_columns,
        [registers.ACC],
        [((UNIT, n), jnp.float32, out_layout)],
        interpret=launch.interpret is not None,
    )
    ctas = launch.ctas

    def kernel(count, expert, x_ref, w0, s0, w1, s1, out, **refs):
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        items = jnp.maximum(lax.div(count[0] * (m_blocks * split) - cta + (ctas - 1), ctas), 0)

        def item(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            # Blocks of one tile are adjacent, so that CTAs working at the same time share its activations in L2.
            index = cta + i * ctas
            block_and_share = lax.rem(index, m_blocks * split)
            return lax.div(index, m_blocks * split), lax.div(block_and_share, split), lax.rem(block_and_share, split)

        def unit_row(m: jax.Array, unit: int) -> jax.Array:
            return m * m_rows + (unit * block if kind == "down" else 0)

        @pl.when(wg == wgs)
        def _load():
            def load_item(i, step):
                t, m, share = item(i)
                slot_of_expert = expert[t]

                def load_step(j, step):
                    slot = lax.rem(step, stages)
                    full = refs["full"].at[slot]
                    pl.when(step >= stages)(lambda: plgpu.barrier_wait(refs["empty"].at[slot]))
                    column = share * k_steps + j
                    for unit, (w, s) in enumerate(((w0, s0), (w1, s1))):
                        row = pl.multiple_of(unit_row(m, unit), block)
                        plgpu.copy_gmem_to_smem(
                            w.at[slot_of_expert, pl.ds(row, block), pl.ds(column * words, words)],
                            refs["words"].at[slot, unit],
                            full,
                        )
                        if flat_scales:
                            line = pl.multiple_of(lax.div(row * step_groups, 8), scale_rows)
                            source = s.at[slot_of_expert, pl.ds(line, scale_rows)]
                        else:
                            source = s.at[slot_of_expert, pl.ds(row, block), pl.ds(column * step_groups, step_groups)]
                        plgpu.copy_gmem_to_smem(source, refs["scales"].at[slot, unit], full)
                    rows = pl.ds(pl.multiple_of(t * n, n), n)
                    plgpu.copy_gmem_to_smem(x_ref.at[rows, pl.ds(column * k_step, k_step)], refs["x"].at[slot], full)
                    return step + 1

                return lax.fori_loop(0, k_steps, load_step, step)

            steps = lax.fori_loop(0, items, load_item, jnp.int32(0))

            def drain(i, carry):
                plgpu.barrier_wait(refs["empty"].at[lax.rem(i, stages)])
                return carry

            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        @pl.when(wg < wgs)
        def _compute():
            def compute_item(i, step):
                t, m, share = item(i)
                step, accumulators = engine.multiply(refs, wg, step, k_steps)
                if fused:
                    gate_sum, up_sum = accumulators
                    accumulators = [gate_sum * (1.0 / (1.0 + jnp.exp(-gate_sum))) * up_sum]
                target = out if fused else out.at[share]
                for unit, acc in enumerate(accumulators):
                    (values,) = as_output(acc)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous copy has read the staging
                    store(refs["staging"].at[wg].transpose((1, 0)), values.astype(out_dtype))
                    plgpu.commit_smem()
                    column = unit_row(m, unit) + wg * UNIT + (unit * out_rows if kind == "gate_up" else 0)
                    rows = pl.ds(pl.multiple_of(t * n, n), n)
                    columns = pl.ds(pl.multiple_of(column, UNIT), UNIT)
                    plgpu.copy_smem_to_gmem(refs["staging"].at[wg], target.at[rows, columns])
                return step

            steps = lax.fori_loop(0, items, compute_item, jnp.int32(0))
            engine.finish(refs, wg, steps)
            plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, Any] = {
        "words": plgpu.SMEM((stages, 2, block, words), jnp.int32, transforms=swizzled(min(words, 32), 4)),
        "scales": plgpu.SMEM((stages, 2, scale_rows, scale_columns), jnp.bfloat16),
        "x": plgpu.SMEM((stages, n, k_step), jnp.bfloat16, transforms=swizzled(64, 2)),
        "staging": plgpu.SMEM((wgs, n, UNIT), out_dtype),
        "full": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages, orders_tensor_core=tile.engine == "blackwell"),
        **engine.scratch,
    }
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="wg",
        kernel_name=f"int4_{kind}",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=launch.interpret,
    )(groups.tile_count, groups.tile_expert, x, units[0].packed, scales[0], units[1].packed, scales[1])
