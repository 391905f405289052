"""MLA tree attention: 1 to 65 rows of a draft tree on a cached latent prefix, in one call."""

from pallas_kernels.tree_attention.api import OPERATION, tree_attention
from pallas_kernels.tree_attention.prefill import prefill_attention
from pallas_kernels.tree_attention.reference import merge
from pallas_kernels.tree_attention.selection import expanded_pays
from pallas_kernels.tree_attention.shapes import Shape
from pallas_kernels.tree_attention.tile import PAGE

__all__ = ["OPERATION", "PAGE", "Shape", "expanded_pays", "merge", "prefill_attention", "tree_attention"]
