"""In which precision weights, cache and messages are counted."""

import dataclasses
from typing import Literal

Format = Literal["int4", "fp8", "nvfp4", "bf16"]
"""Of routed experts."""


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

    @property
    def expert_format(self) -> Format:
        """What kernels of routed experts read."""
        if self.expert_bits is None:
            return "int4"
        return "bf16" if self.expert_bits >= 16 else "fp8" if self.expert_bits >= 8 else "nvfp4"

    def bits(self, part: str) -> float | None:
        """Bits of a part's weights; None for those of its declaration."""
        return {
            "experts": self.expert_bits, "attention": self.attention_bits, "shared_expert": self.shared_bits,
            "dense": self.shared_bits, "head": self.head_bits,
        }.get(part)  # fmt: skip


STORED = Precision()
"""As the checkpoint and the model's type have it."""

FP8_BITS, NVFP4_BITS = 8 + 32 / 128**2, 4 + 8 / 16
"""Of a weight with its share of a scale: float32 for a block of 128 × 128, FP8 for a group of 16."""
# Routed experts alone are quantised, but for FP8, where the head is the only large product that is not.
PRECISIONS: dict[str, Precision] = {
    "int4": STORED,
    "fp8": Precision(FP8_BITS, FP8_BITS, FP8_BITS, 16, None, 1, expert_arithmetic="fp8", dense_arithmetic="fp8"),
    "nvfp4": Precision(NVFP4_BITS, 16, 16, 16, dispatch_bytes=NVFP4_BITS / 8, expert_arithmetic="fp4"),
    "bf16": Precision(16, 16, 16, 16),
}
"""Of weights by the name that quantised checkpoints have; the cache is as the model's type has it."""
