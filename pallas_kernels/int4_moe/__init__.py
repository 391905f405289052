"""INT4 group-32 mixture of experts: reference, GPU kernels and the function that picks between them."""

from pallas_kernels.int4_moe.api import int4_moe

__all__ = ["int4_moe"]
