"""The pages of a group and how many hold on to each."""

from collections.abc import Iterable


class PagePool:
    """Pages 0 to `pages - 1` with reference counts; a page is free exactly while its count is 0."""

    def __init__(self, pages: int):
        self._counts = [0] * pages
        self._free = list(range(pages))[::-1]

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

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
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Holds pages once more.

        Raises:
          ValueError: one of them is free, so that it may become another's.
        """
        for page in pages:
            if not self._counts[page]:
                raise ValueError(f"page {page} is free; only a page that somebody holds can be shared")
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Lets go of pages once; those that nobody else holds are free.

        Raises:
          ValueError: one of them is free already.
        """
        for page in pages:
            if not self._counts[page]:
                raise ValueError(f"page {page} is free already; it was released more often than held")
            self._counts[page] -= 1
            if not self._counts[page]:
                self._free.append(page)
