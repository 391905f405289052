"""The slots and pages of one group of ranks, and who has them."""

import itertools

from kimi_jax.serving.pages import PagePool
from kimi_jax.serving.plan import Admission, Shape, TableRow
from kimi_jax.serving.work import Work


class Group:
    """Works in slots, their pages, and the rows of the page table that have changed since a plan last carried them."""

    def __init__(self, shape: Shape, index: int):
        self.pool = PagePool(shape.pages)
        self.works: dict[int, Work] = {}
        """By slot."""
        self._shape, self._index = shape, index
        self._changed: dict[int, int] = {}

    def oldest_first(self) -> list[Work]:
        """Works in slots by their arrival."""
        return sorted(self.works.values(), key=lambda work: work.arrival)

    def rank(self, tokens: int) -> tuple[int, int, int] | None:
        """The group's place among those that have room for a request now, least first; None without room.

        Args:
          tokens: that need pages at once. A page more is left for each slot that still grows.
        """
        free = self._shape.slots_per_group - len(self.works)
        works = self.works.values()
        if not free or sum(not work.ready for work in works) >= self._shape.lanes:
            return None
        growing = sum(self._shape.pages_for(work.total) > len(work.pages) for work in works)
        if self._shape.pages_for(tokens) + growing > self.pool.free:
            return None
        return -self.pool.free, -free, self._index

    def admit(self, work: Work, tokens: int) -> Admission:
        """Gives a work the lowest free slot, and pages for so many tokens."""
        first = self._index * self._shape.slots_per_group
        slot = next(slot for slot in itertools.count(first) if slot not in self.works)
        self.works[slot] = work
        admission = work.admit(slot, self._index)
        self._changed[slot] = 0
        self.grow(work, tokens)
        return admission

    def missing(self, work: Work, tokens: int) -> int:
        """Pages that a work lacks for so many tokens."""
        return max(self._shape.pages_for(tokens) - len(work.pages), 0)

    def grow(self, work: Work, tokens: int) -> bool:
        """Pages for so many tokens of a work in a slot; False, and none, where they are not to be had."""
        assert work.slot is not None
        missing = self.missing(work, tokens)
        if missing > self.pool.free:
            return False
        if missing:
            self._changed.setdefault(work.slot, len(work.pages))
            work.pages += self.pool.allocate(missing)
        return True

    def vacate(self, work: Work) -> None:
        """Takes a work's slot away, not its pages."""
        assert work.slot is not None
        del self.works[work.slot]
        self._changed[work.slot] = 0
        work.slot = None

    def release(self, work: Work) -> None:
        """Takes a work's pages away. Whatever is in flight runs before the plan in which they can be another's."""
        self.pool.release(work.pages)
        work.pages = []

    def changed_rows(self) -> list[TableRow]:
        """Changes of the page table since the last call."""
        rows = [self._row(slot, start) for slot, start in sorted(self._changed.items())]
        self._changed = {}
        return rows

    def _row(self, slot: int, start: int) -> TableRow:
        work = self.works.get(slot)
        return TableRow(slot, start, tuple(work.pages[start:]) if work else ())
