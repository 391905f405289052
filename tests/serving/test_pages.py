"""A page is free exactly while nobody holds it."""

import random

import pytest

from kimi_jax.serving.pages import PagePool


def test_pages_against_a_dictionary():
    pool, held, drawn = PagePool(20), dict.fromkeys(range(20), 0), random.Random(0)
    for _ in range(5000):
        assert pool.free == sum(not count for count in held.values())
        assert all(pool.count(page) == count for page, count in held.items())
        some = [page for page, count in held.items() if count]
        match drawn.choice(("allocate", "share", "release")):
            case "allocate":
                new = pool.allocate(drawn.randint(0, min(4, pool.free)))
                assert len(set(new)) == len(new)
                assert not any(held[page] for page in new)
                held |= dict.fromkeys(new, 1)
            case "share" if some:
                page = drawn.choice(some)
                pool.share([page])
                held[page] += 1
            case "release" if some:
                page = drawn.choice(some)
                pool.release([page])
                held[page] -= 1


def test_what_cannot_be_is_refused():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="3 pages were asked for and 2 of 2 are free"):
        pool.allocate(3)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(ValueError, match="is free already"):
        pool.release(pages[:1])
    with pytest.raises(ValueError, match="is free; only a page"):
        pool.share(pages[:1])
    assert pool.free == 2
