"""How weights and batch lie on the mesh: logical axis names to the mesh axes dp, ep and tp."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from kimi_jax.parameters import Rules
from meshes.presets import Layout
from pallas_kernels.tree_attention import PAGE

REQUESTS = PartitionSpec(("dp", "ep"))
"""Requests are spread over dp and ep; every tp rank sees the same ones."""


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
