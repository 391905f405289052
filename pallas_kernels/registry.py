"""Every operation by its name."""

from typing import Any

from pallas_kernels import int4_moe, tree_attention
from pallas_kernels.operation import Operation

OPERATIONS: dict[str, Operation[Any, Any]] = {
    operation.name: operation for operation in (int4_moe.OPERATION, tree_attention.OPERATION)
}
