"""What the kernels need of Mosaic GPU in the same way: stores that both versions of jax know, swizzled memory."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


def store(ref: Any, values: jax.Array) -> None:
    """Stores registers to shared or device memory; `plgpu.store` came after jax 0.11.2."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def swizzled(columns: int, itemsize: int) -> tuple[Any, ...]:
    """Transforms of shared memory in the layout that copies and tensor cores agree on: rows of `columns`, swizzled."""
    return (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(columns * itemsize),  # pyright: ignore[reportAbstractUsage]
    )
