"""How weights and batch lie on the mesh: logical axis names to the mesh axes dp, ep and tp."""

from jax.sharding import PartitionSpec

from kimi_jax.parameters import Rules
from meshes.presets import Layout

REQUESTS = PartitionSpec(("dp", "ep"))
"""Requests are spread over dp and ep; every tp rank sees the same ones."""


def rules(layout: Layout) -> Rules:
    """Heads, widths and vocabulary on tp; experts whole on (ep, tp), or cut along their width on tp."""
    return {
        "heads": "tp",
        "mlp": "tp",
        "vocab": "tp",
        "expert": layout.expert_axes,
        "expert_mlp": "tp" if layout.experts == "width" else None,
    }
