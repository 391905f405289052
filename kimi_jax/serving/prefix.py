"""Which pages of a group hold which beginnings of texts, so that a prompt that begins alike starts behind them.

A node is a full page. It is found by its parent and its own key, which holds its token ids, so that they are compared
and not only their hash; the first page's key also holds a salt. A page is held by those whose text runs through it.
Each of them holds its parents too and lets go of the last page first, so that the pool, which gives away what has been
free longest, takes leaves before their parents.
"""

import array
import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence

from kimi_jax.serving.pages import PagePool


def page_key(ids: Sequence[int], salt: str = "") -> bytes:
    """The key of a page with these tokens. Bytes know their hash, and are compared faster than integers."""
    return salt.encode() + array.array("q", ids).tobytes()


def any_share_a_page(prompts: Iterable[Sequence[int]], page_tokens: int) -> bool:
    """Whether two of the prompts begin with the same page, so that keeping pages brings anything."""
    firsts = [page_key(ids[:page_tokens]) for ids in prompts if len(ids) >= page_tokens]
    return len({*firsts}) < len(firsts)


@dataclasses.dataclass(eq=False)
class _Node:
    """A page of tokens behind those of its parent."""

    parent: "_Node | None"
    key: Hashable = b""
    page: int = -1
    owner: object = None
    children: "dict[Hashable, _Node]" = dataclasses.field(default_factory=dict)


class PrefixTree:
    """A group's kept pages, by the texts they hold."""

    def __init__(self, pages: int):
        self.pool = PagePool(pages, self._lose)
        self._root = _Node(None)
        self._nodes: dict[int, _Node] = {}
        """By page."""

    def __len__(self) -> int:
        """Pages of known text."""
        return len(self._nodes)

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The pages of the longest known beginning of a text with these keys. To hold them is the caller's part."""
        return [node.page for node in self._walk(keys)]

    def add(self, keys: Sequence[Hashable], pages: list[int], owner: object, known: int = 0) -> tuple[int, int | None]:
        """Makes full pages of a text known, which their owner holds and which will not change any more.

        Where the tree knows the same text in other pages, those replace the owner's in `pages`, which change hands at
        once: they are held, and the owner's own are let go.

        Args:
          known: of the text's pages, how many are the tree's own already.

        Returns:
          Pages of the text that are the tree's now, and the first place in `pages` that was replaced, or None.
        """
        node, replaced = self._nodes.get(pages[known - 1]) if known else self._root, None
        if node is None:  # dropped
            return known, None
        for place in range(known, min(len(keys), len(pages))):
            key = keys[place]
            child = node.children.get(key)
            if child is None:
                if not self.pool.keep(pages[place]):  # dropped while its owner was reading it
                    break
                child = node.children[key] = _Node(node, key, pages[place], owner)
                self._nodes[child.page] = child
            elif child.page != pages[place]:
                self.pool.share([child.page])
                self.pool.release([pages[place]])
                pages[place] = child.page
                replaced = place if replaced is None else replaced
            node, known = child, place + 1
        return known, replaced

    def drop(self, keys: Sequence[Hashable], owner: object) -> None:
        """Forgets what an owner has added of a text, and all that follows it, because it cannot be trusted."""
        first = next((node for node in self._walk(keys) if node.owner == owner), None)
        if first is None:
            return
        assert first.parent is not None
        del first.parent.children[first.key]
        below = [first]
        while below:
            node = below.pop()
            below += node.children.values()
            del self._nodes[node.page]
            self.pool.bar(node.page)

    def _walk(self, keys: Sequence[Hashable]) -> Iterator[_Node]:
        node = self._root
        for key in keys:
            node = node.children.get(key)
            if node is None:
                return
            yield node

    def _lose(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert node.parent is not None
        assert not node.children, "leaves become free before their parents"
        del node.parent.children[node.key]
