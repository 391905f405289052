"""INT4 group-32 mixture of experts: the specification, the GPU kernels and the function that picks between them."""

from pallas_kernels.int4_moe.api import TOLERANCE, SelfCheck, int4_moe, self_check
from pallas_kernels.int4_moe.plan import Implementation, Plan, Shape, Target, current_target, plan, target_of

__all__ = [
    "TOLERANCE",
    "Implementation",
    "Plan",
    "SelfCheck",
    "Shape",
    "Target",
    "current_target",
    "int4_moe",
    "plan",
    "self_check",
    "target_of",
]
