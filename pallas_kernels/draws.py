"""Random arrays for problems: large ones are made on the device, small ones where no generator has to be compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

SMALL = 2**22
"""Elements up to which NumPy draws."""


class Draws:
    """Successive random arrays from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng, self.key = np.random.default_rng(seed), jax.random.key(seed, impl="rbg")

    def normal(self, *shape: int, dtype: DTypeLike = jnp.bfloat16, std: float = 1.0) -> jax.Array:
        """Normally distributed with a mean of 0."""
        if np.prod(shape) <= SMALL:
            return jnp.asarray(std * self.rng.standard_normal(shape, np.float32), dtype)
        return (std * jax.random.normal(self._next(), shape, dtype)).astype(dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Uniform in [low, high)."""
        if np.prod(shape) <= SMALL:
            return jnp.asarray(self.rng.uniform(low, high, shape), dtype)
        return jax.random.uniform(self._next(), shape, dtype, low, high)

    def words(self, *shape: int) -> jax.Array:
        """Int32 of which every bit is random."""
        if np.prod(shape) <= SMALL:
            return jnp.asarray(self.rng.integers(-(2**31), 2**31, shape), jnp.int32)
        return jax.random.bits(self._next(), shape, jnp.uint32).view(jnp.int32)

    def _next(self) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return key
