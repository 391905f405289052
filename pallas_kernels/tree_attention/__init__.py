"""MLA tree attention: 1 to 65 rows of a draft tree on a cached latent prefix, in one call."""

from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.checks import self_check
from pallas_kernels.tree_attention.prefill import prefill_attention
from pallas_kernels.tree_attention.reference import merge
from pallas_kernels.tree_attention.selection import Choice, Device, choose, expanded_pays

__all__ = ["Choice", "Device", "choose", "expanded_pays", "merge", "prefill_attention", "self_check", "tree_attention"]
