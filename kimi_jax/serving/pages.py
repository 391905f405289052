"""The pages of a group and how many hold on to each."""

from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Pages 0 to `pages - 1` with reference counts; a page is free exactly while its count is 0.

    What a free page holds may be kept for whoever asks for the same again. It is lost once the page is needed for
    something else, which happens in the order in which kept pages became free.
    """

    def __init__(self, pages: int, lost: Callable[[int], None] = lambda page: None):
        """`lost`: called with a kept page that is about to be given to somebody else."""
        self._counts = [0] * pages
        self._empty = list(range(pages))[::-1]
        self._kept: set[int] = set()
        self._barred: set[int] = set()
        self._kept_free: dict[int, None] = {}
        self._lost = lost

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._empty) + len(self._kept_free)

    def count(self, page: int) -> int:
        """How many hold this page."""
        return self._counts[page]

    def allocate(self, count: int) -> list[int]:
        """Free pages, held once from now on.

        Raises:
          ValueError: fewer are free; nothing is allocated then.
        """
        if count > self.free:
            raise ValueError(f"{count} pages were asked for and {self.free} of {len(self._counts)} are free")
        while len(self._empty) < count:
            oldest = next(iter(self._kept_free))
            self._lost(oldest)
            self.forget(oldest)
        pages = [self._empty.pop() for _ in range(count)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Holds pages once more.

        Raises:
          ValueError: one of them is free and was not kept, so that it may hold anything.
        """
        for page in pages:
            if not self._counts[page] and page not in self._kept:
                raise ValueError(f"page {page} is free; only a page that is held or kept can be shared")
            self._kept_free.pop(page, None)
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Lets go of pages once, the last first; those that nobody else holds are free.

        Raises:
          ValueError: one of them is free already.
        """
        for page in reversed(pages):
            if not self._counts[page]:
                raise ValueError(f"page {page} is free already; it was released more often than held")
            self._counts[page] -= 1
            if not self._counts[page]:
                self._barred.discard(page)
                if page in self._kept:
                    self._kept_free[page] = None
                else:
                    self._empty.append(page)

    def keep(self, page: int) -> bool:
        """From now on what a held page holds is kept when it becomes free; False, and not so, for a barred one.

        Raises:
          ValueError: it is free.
        """
        if not self._counts[page]:
            raise ValueError(f"page {page} is free; only a page that somebody holds can be kept")
        if page not in self._barred:
            self._kept.add(page)
        return page in self._kept

    def forget(self, page: int) -> None:
        """Ends `keep`."""
        self._kept.discard(page)
        if page in self._kept_free:
            del self._kept_free[page]
            self._empty.append(page)

    def bar(self, page: int) -> None:
        """Ends `keep` until somebody else has the page: those that hold it now can't keep it again."""
        self.forget(page)
        if self._counts[page]:
            self._barred.add(page)
