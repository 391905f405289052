"""Which expert lies in which slot: ranks hold equally many slots; spare ones stay empty or hold replicas."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kimi_jax.parallel.collectives import axis_index

EMPTY = -1


@dataclasses.dataclass(frozen=True)
class Placement:
    """`slot_experts[s]` is the expert in slot s, or EMPTY; slots of a rank are contiguous, ranks in mesh order.

    An expert in several slots has replicas, which share its rows (`parallel.eplb` makes such placements).
    """

    slot_experts: tuple[int, ...]
    num_experts: int

    def __post_init__(self) -> None:
        held = set(self.slot_experts)
        missing = set(range(self.num_experts)) - held
        if missing:
            raise ValueError(f"no slot holds expert {min(missing)} (and {len(missing) - 1} more)")
        unknown = held - set(range(self.num_experts)) - {EMPTY}
        if unknown:
            raise ValueError(f"a slot holds expert {min(unknown)}; there are experts 0 to {self.num_experts - 1}")

    @property
    def num_slots(self) -> int:
        """Slots over all ranks, empty ones included."""
        return len(self.slot_experts)

    def slots_of(self, experts: Int[Array, "rows ..."]) -> Int[Array, "rows ..."]:
        """The slot that serves each row's experts; an empty slot is never among them.

        Replicas take turns by the number of the row, counted on from one ep rank to the next: rows i and i + 1 go to
        different replicas, and the same row to the same replica every time.
        """
        slots = np.array(self.slot_experts)
        replicas = [np.flatnonzero(slots == expert) for expert in range(self.num_experts)]
        counts = np.array([len(held) for held in replicas])
        table = np.stack([np.resize(held, counts.max()) for held in replicas]).astype(np.int32)
        if counts.max() == 1:
            return jnp.asarray(table[:, 0])[experts]
        rows = experts.shape[0]
        row = axis_index("ep") * rows + jnp.arange(rows).reshape(-1, *[1] * (experts.ndim - 1))
        return jnp.asarray(table)[experts, row % jnp.asarray(counts, jnp.int32)[experts]]


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
