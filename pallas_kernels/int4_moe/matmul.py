"""The grouped product of one call: a persistent kernel whose work list is the active tiles, and its three engines.

A CTA is `warpgroups` computing warpgroups and one that loads. Each computing warpgroup owns two *units* of 64 weight
rows: for gate and up, the same 64 features of both; for down, two runs of 64 outputs. A work item is one tile of
grouped rows times one block of weight rows (times one share of k). The loader streams the stages of all its CTA's items
through a ring without a gap between items. Weights are the left operand, unpacked in registers; activations the right.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.int4_moe import registers
from pallas_kernels.int4_moe.registers import GROUP, register_function
from pallas_kernels.int4_moe.routing import Groups

Engine = Literal["mma", "wgmma", "tcgen05"]
UNIT = 64  # weight rows of a unit


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of one kernel. `k_step` is the k of a pipeline stage, `split` the shares k is cut into."""

    engine: Engine
    rows: int
    warpgroups: int = 2
    k_step: int = 256
    stages: int = 4
    split: int = 1


@dataclasses.dataclass(frozen=True)
class Launch:
    """How many persistent CTAs, and whether the interpreter runs them."""

    ctas: int
    interpret: bool = False


Weights = tuple[Int[Array, "slots out in_words"], BFloat16[Array, "slots out groups"]]


def gate_up(
    x: BFloat16[Array, "grouped hidden"], groups: Groups, gate: Weights, up: Weights, tile: Tile, launch: Launch
) -> BFloat16[Array, "grouped width"]:
    """silu(gate x) · up x of every active tile, in pair order, from activations in pair order.

    With `tile.split` > 1 the shares are summed and the activation applied outside the kernel.
    """
    width = gate[0].shape[1]
    if tile.split == 1:
        return _grouped(x, groups, (gate, up), tile, launch, "gate_up")
    partial = jnp.sum(_grouped(x, groups, (gate, up), tile, launch, "gate_up"), axis=0)
    return registers.pair_order((jax.nn.silu(partial[:, :width]) * partial[:, width:]).astype(jnp.bfloat16))


def down(
    x: BFloat16[Array, "grouped width"], groups: Groups, weights: Weights, tile: Tile, launch: Launch
) -> Float[Array, "grouped hidden"]:
    """Every active tile times its expert's down projection, from activations in pair order."""
    shares = _grouped(x, groups, (weights, weights), tile, launch, "down")
    return jnp.sum(shares, axis=0) if tile.split > 1 else shares[0]


def shared_memory_bytes(tile: Tile, kind: Literal["gate_up", "down"]) -> int:
    """Shared memory of a CTA: the ring's stages and the output staging."""
    weights = 2 * UNIT * tile.warpgroups * (tile.k_step // 2 + tile.k_step // GROUP * 2)
    stage = weights + tile.rows * tile.k_step * 2
    fused = kind == "gate_up" and tile.split == 1
    out = tile.warpgroups * UNIT * tile.rows * (2 if fused else 4)
    return tile.stages * stage + out


def _grouped(x, groups: Groups, units: tuple[Weights, Weights], tile: Tile, launch: Launch, kind) -> jax.Array:
    n, wgs, k_step, stages, split = tile.rows, tile.warpgroups, tile.k_step, tile.stages, tile.split
    grouped, k = x.shape
    out_rows = units[0][0].shape[1]
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
    if flat_scales:
        (w0, s0), (w1, s1) = units
        units = (w0, s0.reshape(s0.shape[0], -1, 8)), (w1, s1.reshape(s1.shape[0], -1, 8))
    fused = kind == "gate_up" and split == 1
    out_dtype = jnp.dtype("bfloat16") if fused else jnp.dtype("float32")
    out_columns = 2 * out_rows if kind == "gate_up" and not fused else out_rows
    out_type = jax.ShapeDtypeStruct((grouped, out_columns) if fused else (split, grouped, out_columns), out_dtype)
    engine = _ENGINES[tile.engine](tile, launch.interpret)
    out_layout = registers.PAIR_OUT if fused else registers.OUT
    as_output = register_function(
        registers.single_columns, [registers.ACC], [((UNIT, n), jnp.float32, out_layout)], interpret=launch.interpret
    )
    ctas = launch.ctas

    def kernel(count, expert, x_ref, w0, s0, w1, s1, out, refs):
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
                    _store(refs["out"].at[wg].transpose((1, 0)), values.astype(out_dtype))
                    plgpu.commit_smem()
                    column = unit_row(m, unit) + wg * UNIT + (unit * out_rows if kind == "gate_up" else 0)
                    rows = pl.ds(pl.multiple_of(t * n, n), n)
                    columns = pl.ds(pl.multiple_of(column, UNIT), UNIT)
                    plgpu.copy_smem_to_gmem(refs["out"].at[wg], target.at[rows, columns])
                return step

            steps = lax.fori_loop(0, items, compute_item, jnp.int32(0))
            engine.finish(refs, wg, steps)
            plgpu.wait_smem_to_gmem(0)

    scratch: dict[str, Any] = {
        "words": plgpu.SMEM((stages, 2, block, words), jnp.int32, transforms=_swizzled(min(words, 32), 4)),
        "scales": plgpu.SMEM((stages, 2, scale_rows, scale_columns), jnp.bfloat16),
        "x": plgpu.SMEM((stages, n, k_step), jnp.bfloat16, transforms=_swizzled(64, 2)),
        "out": plgpu.SMEM((wgs, n, UNIT), out_dtype),
        "full": plgpu.Barrier(num_arrivals=5, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=wgs, num_barriers=stages, orders_tensor_core=tile.engine == "tcgen05"),
        **engine.scratch,
    }
    return plgpu.kernel(
        lambda *refs, **scratch_refs: kernel(*refs, scratch_refs),
        out_type=out_type,
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=wgs + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(groups.tile_count, groups.tile_expert, x, *units[0], *units[1])


def _swizzled(columns: int, itemsize: int) -> tuple[Any, ...]:
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize))


def _store(ref: Any, values: jax.Array) -> None:
    if hasattr(plgpu, "store"):  # jax 0.12
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def _load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=optimized)


class _Engine:
    """One way to multiply a stage; `multiply` runs an item's k steps and returns both units' (64, n) sums.

    A stage is worked on in chunks of k, which bounds the registers in use.
    """

    largest_chunk = 128

    def __init__(self, tile: Tile, interpret: bool) -> None:
        self.tile, self.interpret = tile, interpret
        self.step_groups = tile.k_step // GROUP
        self.chunk = min(self.largest_chunk, tile.k_step)
        self.chunks = tile.k_step // self.chunk
        self.scale_layout = registers.scale_layout(self.step_groups)
        self.scratch: dict[str, Any] = {}
        self.setup()

    def setup(self) -> None:
        """Fill `scratch` and make the register functions."""
        raise NotImplementedError

    def chunk_groups(self) -> list[range]:
        per_chunk = self.chunk // GROUP
        return [range(c * per_chunk, (c + 1) * per_chunk) for c in range(self.chunks)]

    def weights(self, refs: Any, slot: jax.Array, wg: jax.Array) -> list[jax.Array]:
        """Words of both units and scales of both units, in registers."""
        lines, _ = registers.scale_shape(UNIT, self.step_groups)
        words = [_load(refs["words"].at[slot, u, pl.ds(wg * UNIT, UNIT)], registers.WORDS) for u in range(2)]
        scales = [
            _load(refs["scales"].at[slot, u, pl.ds(wg * lines, lines)], self.scale_layout, optimized=False)
            for u in range(2)
        ]
        return [*words, *scales]

    def release(self, refs: Any, slot: jax.Array) -> None:
        # Orders this warpgroup's reads before the next bulk copy's write, which goes through the async proxy.
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["empty"].at[slot])

    def multiply(self, refs: Any, wg: jax.Array, step: jax.Array, k_steps: int):
        raise NotImplementedError

    def finish(self, refs: Any, wg: jax.Array, steps: jax.Array) -> None:
        """Leave every barrier of the engine balanced."""


class _Mma(_Engine):
    """Warp-level mma.sync: for few rows, on every card from sm_80 on; here with the bulk copies of sm_90 and later."""

    def setup(self) -> None:
        n = self.tile.rows
        acc = ((UNIT, n), jnp.float32, registers.ACC)
        layouts = [registers.ACC] * 2 + [registers.WORDS] * 2 + [self.scale_layout] * 2 + [registers.ROWS]
        self.multiply_chunk = [
            register_function(registers.mma_units(n, groups), layouts, [acc, acc], interpret=self.interpret)
            for groups in self.chunk_groups()
        ]

    def multiply(self, refs: Any, wg: jax.Array, step: jax.Array, k_steps: int):
        def k_step(_, carry):
            step, *acc = carry
            slot = lax.rem(step, self.tile.stages)
            plgpu.barrier_wait(refs["full"].at[slot])
            weights = self.weights(refs, slot, wg)
            for chunk, multiply_chunk in enumerate(self.multiply_chunk):
                x = _load(refs["x"].at[slot, :, pl.ds(chunk * self.chunk, self.chunk)], registers.ROWS)
                acc = multiply_chunk(*acc, *weights, x)
            self.release(refs, slot)
            return step + 1, *acc

        zero = plgpu.layout_cast(jnp.zeros((UNIT, self.tile.rows), jnp.float32), registers.ACC)
        step, *acc = lax.fori_loop(0, k_steps, k_step, (step, zero, zero))
        return step, acc


class _Wgmma(_Engine):
    """Hopper's warpgroup instruction, bfloat16(q·scale) in registers as its left operand."""

    largest_chunk = 64  # both units' left operands are in registers at once

    def setup(self) -> None:
        layouts = [registers.WORDS] * 2 + [self.scale_layout] * 2
        unit = ((UNIT, self.chunk), jnp.bfloat16, plgpu.Layout.WGMMA)
        self.dequantize = _dequantizers(self, layouts, [unit, unit], interleave=False)
        if self.interpret:  # the interpreter has no left operand in registers
            shape = (self.tile.warpgroups, 2, UNIT, self.chunk)
            self.scratch["left"] = plgpu.SMEM(shape, jnp.bfloat16, transforms=_swizzled(64, 2))

    def multiply(self, refs: Any, wg: jax.Array, step: jax.Array, k_steps: int):
        def scope(*sums: Any):
            def k_step(_, step):
                slot = lax.rem(step, self.tile.stages)
                plgpu.barrier_wait(refs["full"].at[slot])
                weights = self.weights(refs, slot, wg)
                for chunk, dequantize in enumerate(self.dequantize):
                    right = refs["x"].at[slot, :, pl.ds(chunk * self.chunk, self.chunk)].transpose((1, 0))
                    for unit, left in enumerate(dequantize(*weights)):
                        if self.interpret:
                            refs["left"][wg, unit] = left
                            plgpu.commit_smem()
                            left = refs["left"].at[wg, unit]
                        plgpu.wgmma(sums[unit], left, right)
                        plgpu.wgmma_wait(1)  # the other unit's product stays in flight
                plgpu.wgmma_wait(0)
                self.release(refs, slot)
                return step + 1

            step_after = lax.fori_loop(0, k_steps, k_step, step)
            return step_after, sums[0][...], sums[1][...]

        acc = plgpu.ACC((UNIT, self.tile.rows), jnp.float32)
        step, *acc = pl.run_scoped(scope, acc, acc)
        return step, acc


class _Tcgen05(_Engine):
    """Blackwell's tensor core: bfloat16(q·scale) goes to tensor memory, both units as one left operand of 128 rows."""

    def setup(self) -> None:
        n, wgs = self.tile.rows, self.tile.warpgroups
        self.buffers = min(self.chunks, 2)
        assert self.chunks % self.buffers == 0, self.tile
        layouts = [registers.WORDS] * 2 + [self.scale_layout] * 2
        left = ((2 * UNIT, self.chunk), jnp.bfloat16, plgpu.Layout.TCGEN05)
        self.dequantize = _dequantizers(self, layouts, [left], interleave=True)
        acc = ((UNIT, n), jnp.float32, registers.ACC)
        self.split = register_function(
            registers.split_units, [plgpu.Layout.TCGEN05], [acc, acc], interpret=self.interpret
        )
        self.scratch = {
            "left": plgpu.TMEM((2 * UNIT, wgs * self.buffers * self.chunk), jnp.bfloat16, packed=True),
            "sums": plgpu.TMEM((2 * UNIT, wgs * n), jnp.float32),
            "multiplied": plgpu.Barrier(num_barriers=(wgs, self.buffers), orders_tensor_core=True),
            "summed": plgpu.Barrier(num_barriers=(wgs,), orders_tensor_core=True),
        }

    def multiply(self, refs: Any, wg: jax.Array, step: jax.Array, k_steps: int):
        sums = refs["sums"].at[:, pl.ds(wg * self.tile.rows, self.tile.rows)]

        def k_step(j, step):
            slot = lax.rem(step, self.tile.stages)
            plgpu.barrier_wait(refs["full"].at[slot])
            weights = self.weights(refs, slot, wg)
            for chunk, dequantize in enumerate(self.dequantize):
                buffer = chunk % self.buffers
                done = refs["multiplied"].at[wg, buffer]
                left_ref = refs["left"].at[:, pl.ds((wg * self.buffers + buffer) * self.chunk, self.chunk)]
                right = refs["x"].at[slot, :, pl.ds(chunk * self.chunk, self.chunk)].transpose((1, 0))
                (left,) = dequantize(*weights)
                # The buffer's previous product must have read it.
                pl.when((step > 0) | (chunk >= self.buffers))(functools.partial(plgpu.barrier_wait, done))
                plgpu.async_store_tmem(left_ref, left)
                plgpu.commit_tmem()
                plgpu.tcgen05_mma(sums, left_ref, right, done, accumulate=(j > 0) | (chunk > 0))
            plgpu.commit_smem()
            plgpu.tcgen05_commit_arrive(refs["empty"].at[slot])  # fires when the products have read the activations
            return step + 1

        step = lax.fori_loop(0, k_steps, k_step, step)
        plgpu.tcgen05_commit_arrive(refs["summed"].at[wg])
        plgpu.barrier_wait(refs["summed"].at[wg])
        acc = plgpu.async_load_tmem(sums, layout=plgpu.Layout.TCGEN05)
        plgpu.wait_load_tmem()
        return step, self.split(acc)

    def finish(self, refs: Any, wg: jax.Array, steps: jax.Array) -> None:
        @pl.when(steps > 0)
        def _():
            for buffer in range(self.buffers):
                plgpu.barrier_wait(refs["multiplied"].at[wg, buffer])


def _dequantizers(
    engine: _Engine, layouts: Sequence[Any], results: Sequence[Any], *, interleave: bool
) -> list[Callable[..., Sequence[jax.Array]]]:
    return [
        register_function(
            registers.dequantize_units(groups, interleave=interleave), layouts, results, interpret=engine.interpret
        )
        for groups in engine.chunk_groups()
    ]


_ENGINES: dict[str, type[_Engine]] = {"mma": _Mma, "wgmma": _Wgmma, "tcgen05": _Tcgen05}
