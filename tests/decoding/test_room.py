"""Pages and slots that fit in memory: the ledger's bytes against those of real arrays."""

import dataclasses

import jax
import pytest

from kimi_jax.decoding import room
from kimi_jax.decoding.engine import PLAIN, Draft
from kimi_jax.decoding.generate import Limits, Request
from kimi_jax.decoding.sampling import Sampling

CAPACITY = 256


def _largest(tree) -> int:
    """Bytes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("mesh", ["local", "hgx-ib-16 split cache"])
def test_a_page_and_a_slot_hold_what_the_ledger_says(engines, mesh):
    engine = engines(mesh)
    queue = engine.queue(3 * engine.layout.groups, CAPACITY, draft=Draft(budget=7))
    state, shape, programs = queue.session.state, queue.session.shape, queue.session.programs
    assert room.page_bytes(engine, programs, shared=True) * shape.pages == _largest((state.cache, state.context_pages))
    assert room.page_bytes(engine, programs, shared=False) * shape.pages == _largest(state.cache)
    assert room.slot_bytes(engine, programs, shape.capacity) * 3 == _largest(state.context)
    assert room.slot_bytes(engine, engine.programs(PLAIN), CAPACITY) == 0


@pytest.fixture
def small(engines):
    return engines()


@pytest.mark.parametrize("pages", [4, 9, 11])
def test_the_largest_number_of_pages_that_fits_is_taken(small, monkeypatch, pages):
    draft = Draft(budget=7)
    programs = small.programs(draft)
    held = room._held_bytes(small) + 3 * room.slot_bytes(small, programs, CAPACITY)
    monkeypatch.setattr(
        room, "device_bytes", lambda mesh: held + (pages + 0.9) * room.page_bytes(small, programs, True)
    )
    assert small.queue(3, CAPACITY, draft=draft).session.shape.pages == pages
    with pytest.raises(ValueError, match=f"{pages + 1} pages of 64 tokens are wanted of each group; {pages} fit"):
        small.queue(3, CAPACITY, Limits(pages=pages + 1), draft)
    assert small.queue(3, CAPACITY, Limits(pages=4), draft).session.shape.pages == 4


def test_what_can_never_fit_is_refused_at_once_with_what_would(small, monkeypatch):
    draft = Draft(budget=7)
    programs = small.programs(draft)
    page, shared = (room.page_bytes(small, programs, shared) for shared in (False, True))
    held = room._held_bytes(small)
    slot = room.slot_bytes(small, programs, 3 * 64)
    monkeypatch.setattr(room, "device_bytes", lambda mesh: held + 3 * slot + 2.5 * page)
    with pytest.raises(ValueError, match=r"up to 182 tokens .* room for 128, 2 pages of 64 as memory holds"):
        next(small.serve([Request([5] * 150, Sampling(), 0, 32)], draft=draft, slots=3))
    slot = room.slot_bytes(small, programs, CAPACITY)
    monkeypatch.setattr(room, "device_bytes", lambda mesh: held + 3 * slot + 1.5 * shared)
    with pytest.raises(ValueError, match=r"4 slots leave no memory for a page .* weights: 3 slots would"):
        small.queue(4, CAPACITY, draft=draft)


def test_fewer_pages_than_slots_want_decode_the_same_text(small):
    requests = [Request([9 + at, 5, 7, 11], Sampling(), 0, 100) for at in range(3)]

    def texts(limits: Limits) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in requests]
        for step in small.serve([dataclasses.replace(each, stop_ids=()) for each in requests], limits):
            for text, new in zip(found, step.new_tokens, strict=True):
                text += new
        return found

    assert texts(Limits(pages=3)) == texts(Limits())
