"""Which expert lies in which slot: ranks hold equally many slots; spare ones stay empty or hold replicas."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kimi_jax.parallel.collectives import axis_index

EMPTY = -1

SlotExperts = Sequence[int] | Mapping[int, Sequence[int]]
"""Expert in each slot, EMPTY for none: of all layers alike, or by layer."""


def slots_of_layer(slot_experts: SlotExperts, path: Sequence[str | int]) -> Sequence[int]:
    """Experts in the slots of the stack at `path` in the parameters, whose only number is its layer."""
    if not isinstance(slot_experts, Mapping):
        return slot_experts
    return slot_experts[next(name for name in path if isinstance(name, int))]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlacementTable:
    """A placement as arrays, so that a compiled program takes any placement with as many slots."""

    slots: Int[Array, " slots"]
    """Ordered by the expert they hold; empty ones last."""
    starts: Int[Array, " experts"]
    """Where each expert's slots begin."""
    counts: Int[Array, " experts"]
    """Slots of each expert, one at least."""

    @property
    def num_slots(self) -> int:
        """Slots over all ranks, empty ones included."""
        return self.slots.shape[0]

    def slots_of(self, experts: Int[Array, "rows ..."]) -> Int[Array, "rows ..."]:
        """The slot that serves each row's experts; an empty slot is never among them.

        Replicas take turns by the number of the row, counted on from one ep rank to the next: rows i and i + 1 go to
        different replicas, and the same row to the same replica every time.
        """
        rows = experts.shape[0]
        row = axis_index("ep") * rows + jnp.arange(rows).reshape(-1, *[1] * (experts.ndim - 1))
        return self.slots[self.starts[experts] + row % self.counts[experts]]


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
        """As `PlacementTable.slots_of`, the placement part of the program; one look-up where nothing is replicated."""
        table = self.table()
        if table.counts.max() == 1:
            return jnp.asarray(table.slots[table.starts])[experts]
        return jax.tree.map(jnp.asarray, table).slots_of(experts)

    def table(self) -> PlacementTable:
        """The same as arrays of the host."""
        held = np.array(self.slot_experts)
        order = np.argsort(np.where(held == EMPTY, self.num_experts, held), kind="stable")
        counts = np.bincount(held[held != EMPTY], minlength=self.num_experts)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        return PlacementTable(*(cast(Array, values.astype(np.int32)) for values in (order, starts, counts)))


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
