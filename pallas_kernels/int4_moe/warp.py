"""The engine for few rows an expert: warp-level mma.sync."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_moe import registers
from pallas_kernels.int4_moe.engine import Engine
from pallas_kernels.int4_moe.registers import register_function
from pallas_kernels.int4_moe.tile import UNIT


class Warp(Engine):
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
                x = plgpu.load(refs["x"].at[slot, :, pl.ds(chunk * self.chunk, self.chunk)], layout=registers.ROWS)
                acc = multiply_chunk(*acc, *weights, x)
            self.release(refs, slot)
            return step + 1, *acc

        zero = plgpu.layout_cast(jnp.zeros((UNIT, self.tile.rows), jnp.float32), registers.ACC)
        step, *acc = lax.fori_loop(0, k_steps, k_step, (step, zero, zero))
        return step, acc
