"""The slots and pages of one group of ranks, and who has them."""

import dataclasses
import itertools
from collections.abc import Iterable

from kimi_jax.serving.plan import Admission, Shape, TableRow
from kimi_jax.serving.prefix import PrefixTree
from kimi_jax.serving.work import Work


@dataclasses.dataclass(frozen=True)
class Room:
    """A group that has a slot and pages for a request."""

    group: "Group"
    pages: int
    """Free ones."""
    slots: int
    """Free ones."""
    lane_in: int
    """Tokens that are prefilled before a lane is free."""
    hit: tuple[int, ...] = ()
    """Pages that hold the beginning of the request's prompt."""
    coming: int = 0
    """Pages of it that there will be once what is being prefilled is, if those are more, else 0."""

    @property
    def freest(self) -> tuple[int, int, int]:
        """Greatest where most is free."""
        return self.pages, self.slots, -self.group.index


class Group:
    """Works in slots, their pages, and the rows of the page table that have changed since a plan last carried them."""

    def __init__(self, shape: Shape, index: int, prefix_cache: bool):
        self.index = index
        self.works: dict[int, Work] = {}
        """By slot."""
        self._tree = PrefixTree(shape.pages, shape.page_tokens)
        self.pool = self._tree.pool
        self._shape, self._prefix_cache = shape, prefix_cache
        self._changed: dict[int, int] = {}

    def oldest_first(self) -> list[Work]:
        """Works in slots by their arrival."""
        return sorted(self.works.values(), key=lambda work: work.arrival)

    def room(self, work: Work, tokens: int, flying: Iterable[Work]) -> Room | None:
        """The group's room for a request now, or None without a slot or pages.

        Args:
          tokens: that need pages at once. A page more is left for each slot that still grows.
          flying: works of this group with a chunk in flight; they may have left their slots.
        """
        free = self._shape.slots_per_group - len(self.works)
        if not free:
            return None
        works = self.works.values()
        hit = tuple(self._tree.find(work.ids[: work.reusable], work.request.salt)) if self._prefix_cache else ()
        growing = sum(self._shape.pages_for(other.total) > len(other.pages) for other in works)
        held = sum(self.pool.count(page) > 0 for page in hit)
        if self._shape.pages_for(tokens) - held + growing > self.pool.free:
            return None
        left = [len(other.ids) - other.prefilled for other in works if not other.ready]
        lane_in = min(left) if len(left) >= self._shape.lanes else 0
        coming = 0
        if self._prefix_cache:
            others = {*flying, *(other for other in works if other.committed < len(other.ids))}
            coming = max((self._common_pages(work, other) for other in others), default=0)
        return Room(self, self.pool.free, free, lane_in, hit, coming if coming > len(hit) else 0)

    def _common_pages(self, work: Work, other: Work) -> int:
        """Full pages that a work could share with another once that one's prompt was prefilled."""
        if work.request.salt != other.request.salt:
            return 0
        size, count = self._shape.page_tokens, 0
        most = min(work.reusable, len(other.ids)) // size
        while (
            count < most and work.ids[count * size : (count + 1) * size] == other.ids[count * size : (count + 1) * size]
        ):
            count += 1
        return count

    def admit(self, work: Work, tokens: int, hit: Iterable[int]) -> Admission:
        """Gives a work the lowest free slot, pages that hold its beginning, and more for so many tokens."""
        first = self.index * self._shape.slots_per_group
        slot = next(slot for slot in itertools.count(first) if slot not in self.works)
        self.works[slot] = work
        work.pages = [*hit]
        work.kept = len(work.pages)
        self.pool.share(work.pages)
        admission = work.admit(slot, self.index)
        work.prefilled = work.committed = work.kept * self._shape.page_tokens
        self._changed[slot] = 0
        self.grow(work, tokens)
        return dataclasses.replace(admission, cached=work.committed)

    def keep(self, work: Work) -> None:
        """Lets others share the full pages of what a work is known to have computed."""
        if not self._prefix_cache:
            return
        work.kept, replaced = self._tree.add(work.text, work.pages, work.arrival, work.request.salt, work.kept)
        if replaced is not None and work.slot is not None:
            self._changed[work.slot] = min(self._changed.get(work.slot, replaced), replaced)

    def distrust(self, work: Work) -> None:
        """Nobody else gets the pages of a request that failed."""
        self._tree.drop(work.ids, work.arrival, work.request.salt)

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
