"""The slots and pages of one group of ranks, and who has them."""

import dataclasses
import itertools
from collections.abc import Iterable

from kimi_jax.serving.plan import Admission, Shape, TableRow
from kimi_jax.serving.prefix import PrefixTree
from kimi_jax.serving.work import Work


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a group with a free slot has for the next request."""

    group: "Group"
    slots: int
    """Free ones."""
    growing: int
    """Slots that will need more pages."""
    lane_in: int
    """Tokens that are prefilled before a lane is free."""
    prefilling: tuple[Work, ...]
    """Works whose prompts are not all committed, also those that have left their slots."""

    @property
    def freest(self) -> tuple[int, int, int]:
        """Greatest where most is free."""
        return self.group.pool.free, self.slots, -self.group.index


@dataclasses.dataclass(frozen=True)
class Room:
    """An opening with pages for a request."""

    opening: Opening
    hit: tuple[int, ...] = ()
    """Pages that hold the beginning of the request's prompt."""
    coming: int = 0
    """Pages of it that there will be once what is being prefilled is, if those are more, else 0."""


class Group:
    """Works in slots, their pages, and the rows of the page table that have changed since a plan last carried them."""

    def __init__(self, shape: Shape, index: int, prefix_cache: bool, drafter_goes_on: bool = True):
        self.index = index
        self.works: dict[int, Work] = {}
        """By slot."""
        self._tree = PrefixTree(shape.pages)
        self.pool = self._tree.pool
        self._shape, self._prefix_cache, self._drafter_goes_on = shape, prefix_cache, drafter_goes_on
        self._changed: dict[int, int] = {}

    def oldest_first(self) -> list[Work]:
        """Works in slots by their arrival."""
        return sorted(self.works.values(), key=lambda work: work.arrival)

    def opening(self, flying: Iterable[Work]) -> Opening | None:
        """What there is for the next request, or None without a slot.

        Args:
          flying: works of this group with a chunk in flight.
        """
        slots = self._shape.slots_per_group - len(self.works)
        if not slots:
            return None
        works = self.works.values()
        growing = sum(self._shape.pages_for(work.total) > len(work.pages) for work in works)
        left = [len(work.ids) - work.prefilled for work in works if not work.ready]
        lane_in = min(left) if len(left) >= self._shape.lanes else 0
        prefilling = {*flying, *(work for work in works if work.committed < len(work.ids))}
        return Opening(self, slots, growing, lane_in, tuple(prefilling))

    def room(self, opening: Opening, work: Work, tokens: int) -> Room | None:
        """Room for a request in an opening of this group, or None without pages.

        Args:
          tokens: that need pages at once. A page more is left for each slot that still grows.
        """
        keys = self._keys(work) if self._drafter_goes_on else []
        hit = tuple(self._tree.find(keys))
        held = sum(self.pool.count(page) > 0 for page in hit)
        if self._shape.pages_for(tokens) - held + opening.growing > self.pool.free:
            return None
        coming = max((self._common(keys, other) for other in opening.prefilling), default=0) if keys else 0
        return Room(opening, hit, coming if coming > len(hit) else 0)

    def missed(self, work: Work) -> int:
        """Tokens at a work's beginning that pages hold and the drafter cannot go on from."""
        return 0 if self._drafter_goes_on else len(self._tree.find(self._keys(work))) * self._shape.page_tokens

    def _keys(self, work: Work) -> list[bytes]:
        """Keys of the pages that may be found."""
        return work.keys(work.reusable, self._shape.page_tokens) if self._prefix_cache else []

    def _common(self, keys: list[bytes], other: Work) -> int:
        """Pages at the beginning that another's prompt has too."""
        both = zip(keys, other.keys(len(other.ids), self._shape.page_tokens), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

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
        keys = work.keys(work.cached, self._shape.page_tokens)
        work.kept, replaced = self._tree.add(keys, work.pages, work.arrival, work.kept)
        if replaced is not None and work.slot is not None:
            self._changed[work.slot] = min(self._changed.get(work.slot, replaced), replaced)

    def distrust(self, work: Work) -> None:
        """Nobody else gets the pages of a request that failed."""
        self._tree.drop(work.keys(len(work.ids), self._shape.page_tokens), work.arrival)

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
