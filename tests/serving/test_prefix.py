"""The tree of kept pages against a dictionary of all texts, with keys whose hashes collide."""

import random
from collections.abc import Sequence

import pytest

from kimi_jax.serving.pages import PagePool
from kimi_jax.serving.prefix import PrefixTree, any_share_a_page, page_key


class Colliding(bytes):
    """A key whose hash is everybody's."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 7


def keys(text: Sequence[int], size: int = 1, salt: str = "") -> list[Colliding]:
    """Colliding keys of a text's full pages."""
    starts = range(0, len(text) - size + 1, size)
    return [Colliding(page_key(text[start : start + size], "" if start else salt)) for start in starts]


def test_a_key_is_its_ids_and_its_salt():
    made = [
        page_key(*of) for of in (((1, 2),), ((1, 3),), ((2, 1),), ((1,),), ((1, 2), "a"), ((1, 2), "b"), ((-1, 2**62),))
    ]
    assert len(set(made)) == len(made)
    assert page_key([1, 2], "a") == page_key((1, 2), "a")


def test_colliding_pages_are_told_apart():
    one, other = (1, 2), (3, 2)
    assert len({hash(key) for key in keys((*one, *other), 2)}) == 1
    tree = PrefixTree(4)
    pages = tree.pool.allocate(2)
    tree.add(keys((*one, *one), 2), pages, "a")
    assert tree.find(keys((*one, *one, 9), 2)) == pages
    assert tree.find(keys((*one, *other), 2)) == pages[:1]
    assert tree.find(keys((*other, *one), 2)) == []
    assert tree.find(keys((*one, *one), 2, "other")) == []
    assert tree.find(keys((1,), 2)) == []


def test_the_leaf_that_was_free_longest_goes_first():
    tree = PrefixTree(6)
    first, second = tree.pool.allocate(3), tree.pool.allocate(2)
    tree.add(keys((1, 2, 3)), first, "a")
    tree.add(keys((7, 8)), second, "b")
    tree.pool.release(first)
    tree.pool.release(second)
    assert tree.pool.free == 6
    tree.pool.share(tree.find(keys((1, 2))))  # used again: only its leaf is older than the second text
    tree.pool.release(first[:2])
    held = tree.pool.allocate(1)
    assert len(tree) == 5  # an empty page was left
    for texts, known in (
        ((1, 2, 3), [(1, 2), (7, 8)]),
        ((7, 8), [(1, 2), (7,)]),
        ((7,), [(1, 2)]),
        ((1, 2), [(1,)]),
        ((1,), []),
    ):
        assert tree.find(keys(texts))
        held += tree.pool.allocate(1)
        assert all(len(tree.find(keys(text))) == len(text) for text in known)
        assert len(tree.find(keys(texts))) == len(texts) - 1
    assert (len(tree), tree.pool.free) == (0, 0)
    tree.pool.release(held)


def test_the_same_text_in_other_pages_changes_hands():
    tree = PrefixTree(8)
    first, second = tree.pool.allocate(2), tree.pool.allocate(3)
    own = list(second)
    assert tree.add(keys((1, 2, 3, 4), 2), first, "a") == (2, None)
    assert tree.add(keys((1, 2, 3, 4, 5, 6), 2), second, "b") == (3, 0)
    assert second == [*first, own[2]]
    assert [tree.pool.count(page) for page in (*second, *own[:2])] == [2, 2, 1, 0, 0]
    tree.pool.release(first)
    assert tree.find(keys((1, 2, 3, 4, 5, 6), 2)) == second
    tree.pool.release(second)
    assert tree.pool.free == 8


def test_what_failed_is_forgotten_with_all_behind_it():
    tree = PrefixTree(8)
    good, failed = tree.pool.allocate(2), tree.pool.allocate(4)
    tree.add(keys((1, 2)), good, "good")
    tree.add(keys((1, 2, 3, 4)), failed, "failed")
    after = [*tree.find(keys((1, 2, 3, 4))), *tree.pool.allocate(1)]
    tree.pool.share(after[:4])
    tree.add(keys((1, 2, 3, 4, 5)), after, "after")
    tree.drop(keys((1, 2, 3, 4)), "failed")
    assert tree.find(keys((1, 2, 3, 4, 5))) == good
    tree.add(keys((1, 2, 3, 4, 5)), after, "after")  # reads them still, but they are no one else's any more
    assert tree.find(keys((1, 2, 3, 4, 5))) == good
    for pages in (good, failed, after):
        tree.pool.release(pages)
    assert tree.pool.free == 8
    tree.drop(keys((1, 2, 3)), "failed")
    assert len(tree) == 2
    pages = [*tree.find(keys((1, 2))), *tree.pool.allocate(6)]  # in other hands the same page is as good as any
    assert set(failed[2:]) <= set(pages)
    tree.add(keys((1, 2, 3, 4, 5, 6, 7, 8)), pages, "new")
    assert tree.find(keys((1, 2, 3, 4, 5, 6, 7, 8))) == pages


def test_pages_are_kept_where_two_prompts_begin_with_the_same():
    assert any_share_a_page([(1, 2, 3), (4, 5), (1, 2)], 2)
    assert not any_share_a_page([(1, 2, 3), (1, 3, 3), (1,), (1,)], 2)


def test_only_held_pages_are_kept_and_only_known_ones_shared():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 0 is free; only a page that somebody holds can be kept"):
        pool.keep(0)
    with pytest.raises(ValueError, match="page 0 is free; only a page that is held or kept"):
        pool.share([0])


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_prompts_against_a_dictionary(seed):
    """Requests come, add pages bit by bit, end, fail or are killed; what is found is always what was written there."""
    drawn = random.Random(seed)
    pages, size = drawn.choice((6, 20, 60)), drawn.choice((1, 2, 3))
    tree = PrefixTree(pages)
    written: dict[int, tuple[str, tuple[int, ...]]] = {}
    """By page: salt and the whole text up to its end."""
    running: dict[int, tuple[str, tuple[int, ...], list[int], int]] = {}
    texts: list[tuple[int, ...]] = [()]
    dropped: set[int] = set()
    hits = evictions = 0
    for number in range(2500):
        # New texts branch off old ones.
        old = drawn.choice(texts)
        text = old[: drawn.randrange(len(old) + 1)]
        text += tuple(drawn.randrange(4) for _ in range(drawn.randrange(1, 3 * size + 2)))
        texts = [*texts[-30:], text]
        salt = drawn.choice(("", "", "", "tenant"))
        found = tree.find(keys(text[:-1], size, salt))
        for place, page in enumerate(found, 1):
            assert written[page] == (salt, text[: place * size])
        needed = -(-len(text) // size)
        if needed - sum(tree.pool.count(page) > 0 for page in found) <= tree.pool.free:
            known = len(tree)
            hits += len(found)
            tree.pool.share(found)
            held = [*found, *tree.pool.allocate(needed - len(found))]
            evictions += known - len(tree)
            dropped -= set(held[len(found) :])
            running[number] = salt, text, held, len(found)
        for id in [id for id in running if drawn.random() < 0.3]:
            salt, text, held, filled = running.pop(id)
            kept = filled
            more = min(filled + drawn.randrange(3), len(text) // size)
            for place in range(filled, more):
                assert tree.pool.count(held[place]) == 1, "nobody else reads a page that is written"
                written[held[place]] = salt, text[: (place + 1) * size]
            if drawn.random() < 0.1:
                known = set(tree.find(keys(text, size, salt)))
                tree.drop(keys(text, size, salt), id)
                dropped |= known - set(tree.find(keys(text, size, salt)))
                tree.pool.release(held)
                continue
            tree.add(keys(text[: more * size], size, salt), held, id, drawn.choice((0, kept)))
            found = tree.find(keys(text[: more * size], size, salt))
            if found != held[:more]:
                assert next(own for own, page in zip(held, [*found, None], strict=False) if own != page) in dropped
            if more == len(text) // size or drawn.random() < 0.1:
                tree.pool.release(held)
            else:
                running[id] = salt, text, held, more
        counts = [0] * pages
        for _, _, held, _ in running.values():
            for page in held:
                counts[page] += 1
        assert [tree.pool.count(page) for page in range(pages)] == counts
        assert tree.pool.free == counts.count(0)
        assert len(tree) <= pages
    for _, _, held, _ in running.values():
        tree.pool.release(held)
    assert tree.pool.free == pages
    assert hits > 50
    assert evictions > 50
    tree.pool.allocate(pages)
    assert len(tree) == 0
