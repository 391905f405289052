"""INT4 group-32 mixture of experts: the specification, the GPU kernels and the function that picks between them."""

from pallas_kernels.int4_moe.api import OPERATION, int4_moe
from pallas_kernels.int4_moe.reference import PackedWeight, Stack
from pallas_kernels.int4_moe.selection import Shape

__all__ = ["OPERATION", "PackedWeight", "Shape", "Stack", "int4_moe"]
