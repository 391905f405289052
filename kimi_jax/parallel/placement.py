"""Which expert lies in which slot: ranks hold equally many slots, so some stay empty where experts do not divide."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

EMPTY = -1


@dataclasses.dataclass(frozen=True)
class Placement:
    """`slot_experts[s]` is the expert in slot s, or EMPTY; slots of a rank are contiguous, ranks in mesh order."""

    slot_experts: tuple[int, ...]
    num_experts: int

    def __post_init__(self) -> None:
        missing = set(range(self.num_experts)) - set(self.slot_experts)
        if missing:
            raise ValueError(f"no slot holds expert {min(missing)} (and {len(missing) - 1} more)")

    @property
    def num_slots(self) -> int:
        """Slots over all ranks, empty ones included."""
        return len(self.slot_experts)

    def slots_of(self, experts: Int[Array, "..."]) -> Int[Array, "..."]:
        """The slot that serves each expert id; an empty slot is never among them."""
        first = np.full(self.num_experts, EMPTY, np.int32)
        for slot in reversed(range(self.num_slots)):
            if self.slot_experts[slot] != EMPTY:
                first[self.slot_experts[slot]] = slot
        return jnp.asarray(first)[experts]


def even_placement(num_experts: int, ranks: int) -> Placement:
    """Every expert once, consecutive experts together, the fullest rank at most one above the emptiest.

    384 experts over 72 ranks take 432 slots: 24 ranks hold six experts, 48 hold five and an empty slot.
    """
    per_rank = -(-num_experts // ranks)
    slots: list[int] = []
    for rank in range(ranks):
        held = range(rank * num_experts // ranks, (rank + 1) * num_experts // ranks)
        slots += [*held, *[EMPTY] * (per_rank - len(held))]
    return Placement(tuple(slots), num_experts)
