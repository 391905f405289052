"""The engine for Hopper's warpgroup instruction, wgmma."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_moe.engine import Engine, dequantizers
from pallas_kernels.int4_moe.tile import UNIT
from pallas_kernels.mosaic import swizzled


class Hopper(Engine):
    """Hopper's warpgroup instruction, bfloat16(q·scale) in registers as its left operand."""

    largest_chunk = 64  # both units' left operands are in registers at once

    def setup(self) -> None:
        unit = ((UNIT, self.chunk), jnp.bfloat16, plgpu.Layout.WGMMA)
        self.dequantize = dequantizers(self, [unit, unit], interleave=False)
        if self.interpret:  # the interpreter has no left operand in registers
            shape = (self.tile.warpgroups, 2, UNIT, self.chunk)
            self.scratch["left"] = plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(64, 2))

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

        acc = plgpu.WGMMAAccumulatorRef((UNIT, self.tile.rows), jnp.float32)
        step, *acc = pl.run_scoped(scope, acc, acc)
        return step, acc
