"""In which precision weights, cache and messages are counted."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bits of a weight, and bytes of a value that is cached or sent, where they are not those of the checkpoint."""

    expert_bits: float | None = None
    attention_bits: float | None = None
    shared_bits: float | None = None
    """Shared experts and dense layers."""
    head_bits: float | None = None
    cache_bytes: float | None = None
    """Of one cached value."""
    dispatch_bytes: float | None = None
    """Of one value of a row on its way to an expert; sums come back in the model's type."""
    expert_arithmetic: Literal["bf16", "fp8", "fp4"] = "bf16"
    dense_arithmetic: Literal["bf16", "fp8"] = "bf16"

    def bits(self, part: str) -> float | None:
        """Bits of a part's weights; None for those of its declaration."""
        return {
            "experts": self.expert_bits, "attention": self.attention_bits, "shared_expert": self.shared_bits,
            "dense": self.shared_bits, "head": self.head_bits,
        }.get(part)  # fmt: skip


STORED = Precision()
"""As the checkpoint and the model's type have it."""
