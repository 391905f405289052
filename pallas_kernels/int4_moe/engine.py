"""What the three engines share: the sizes of a kernel, and how a stage's weights reach the registers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_moe import registers
from pallas_kernels.int4_moe.registers import register_function
from pallas_kernels.int4_moe.tile import GROUP, UNIT, Tile


class Engine:
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
        words = [
            plgpu.load(refs["words"].at[slot, u, pl.ds(wg * UNIT, UNIT)], layout=registers.WORDS) for u in range(2)
        ]
        scales = [
            plgpu.load(refs["scales"].at[slot, u, pl.ds(wg * lines, lines)], layout=self.scale_layout, optimized=False)
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


def dequantizers(
    engine: Engine, results: Sequence[Any], *, interleave: bool
) -> list[Callable[..., Sequence[jax.Array]]]:
    """Per chunk, the function that unpacks both units' weights to bfloat16(q·scale)."""
    layouts = [registers.WORDS] * 2 + [engine.scale_layout] * 2
    return [
        register_function(
            registers.dequantize_units(groups, interleave=interleave), layouts, results, interpret=engine.interpret
        )
        for groups in engine.chunk_groups()
    ]
