"""How weights and batch lie on the mesh: logical axis names to the mesh axes dp, ep and tp."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from kimi_jax.parameters import Rules
from meshes.presets import Layout
from pallas_kernels.tree_attention import PAGE

REQUESTS = PartitionSpec(("dp", "ep"))
"""Requests are spread over dp and ep; every tp rank sees the same ones."""


def over_mesh(
    function: Callable[..., Any], mesh: Mesh, in_specs: object, out_specs: object, donate: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """One program for all devices of a mesh, compiled when it is first run; `jax.shard_map` says what the specs mean.

    No collective is added by the compiler. GPUs would round float32 products to TF32: here they do not, and bfloat16
    ones do not change.
    """

    @functools.wraps(function)
    def exact(*arguments: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*arguments)

    mapped = jax.shard_map(exact, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


def rules(layout: Layout) -> Rules:
    """Heads, widths and vocabulary on tp; experts whole on (ep, tp), or cut along their width on tp.

    `positions` is the axis that splits the latent cache of a request, None where each tp rank has it whole.
    """
    return {
        "heads": "tp",
        "mlp": "tp",
        "vocab": "tp",
        "expert": layout.expert_axes,
        "expert_mlp": "tp" if layout.experts == "width" else None,
        "positions": "tp" if layout.cache == "split" and layout.tp > 1 else None,
    }


def cache_axis(rules: Rules) -> str | None:
    """Mesh axis whose ranks share a request's cached positions; None where each of them has all."""
    axis = rules["positions"]
    assert axis is None or isinstance(axis, str)
    return axis


def cache_multiple(rules: Rules, axis_sizes: Mapping[str, int]) -> int:
    """Tokens of a page: `PAGE` positions of each rank that has a part of it."""
    axis = cache_axis(rules)
    return PAGE * (1 if axis is None else axis_sizes[axis])


def cache_spec(rules: Rules) -> PartitionSpec:
    """How the arrays of a latent cache lie on the mesh."""
    return PartitionSpec(*REQUESTS, cache_axis(rules))
