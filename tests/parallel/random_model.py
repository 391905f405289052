"""Random weights that are the same model on every layout."""

import zlib

import jax.numpy as jnp
import numpy as np

from kimi_jax.model.transformer import CausalLM
from kimi_jax.parameters import Parameters, declarations, from_leaves


def random_weights(model: CausalLM) -> Parameters:
    """The same for every placement: an expert's weights are drawn by its number, whatever its slot."""

    def draw(path, shape, dtype):
        rng = np.random.default_rng(zlib.crc32(repr(path).encode()))
        if jnp.issubdtype(dtype, jnp.integer):
            return rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        if path[-1] == "scale":
            return np.asarray(rng.uniform(0.005, 0.02, shape), dtype)
        return np.asarray(rng.normal(size=shape) / np.sqrt(shape[-1] if len(shape) > 1 else 1), dtype)

    leaves = {}
    for d in declarations(model, jnp.float32):
        if d.stacked:
            experts = draw(d.path, (model.config.n_routed_experts, *d.shape[1:]), d.dtype)
            layer = next(name for name in d.path if isinstance(name, int))
            leaves[d.path] = experts[np.maximum(model.slot_experts[layer], 0)]
        else:
            leaves[d.path] = draw(d.path, d.shape, d.dtype)
    return from_leaves(model, leaves)
