"""The engine for Blackwell's tensor core, tcgen05."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_moe import registers
from pallas_kernels.int4_moe.engine import Engine, dequantizers
from pallas_kernels.int4_moe.registers import register_function
from pallas_kernels.int4_moe.tile import UNIT


class Blackwell(Engine):
    """Blackwell's tensor core: bfloat16(q·scale) goes to tensor memory, both units as one left operand of 128 rows."""

    def setup(self) -> None:
        n, wgs = self.tile.rows, self.tile.warpgroups
        self.buffers = min(self.chunks, 2)
        assert self.chunks % self.buffers == 0, self.tile
        left = ((2 * UNIT, self.chunk), jnp.bfloat16, plgpu.Layout.TCGEN05)
        self.dequantize = dequantizers(self, [left], interleave=True)
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
