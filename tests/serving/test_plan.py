"""Plans as plain data: what is written is what is read, and bad sizes are refused."""

import dataclasses

import numpy as np
import pytest

from kimi_jax.serving.plan import Admission, Lane, Plan, Request, Settings, Shape, TableRow, update_table

SHAPE = Shape(groups=2, slots_per_group=3, pages=8, page_tokens=4, tiles=5, lanes=1, chunk=8, depth=3)


def test_a_plan_survives_its_json():
    settings = Settings(0.7, 40, 0.95, 0.05, (2**32 - 1, 7), (1, 2), 3, 15, 5, 0)
    plan = Plan(
        7,
        (TableRow(1, 0, (5, 0)), TableRow(4, 2, ())),
        (Admission(1, 'a "quoted" ü', 9, 4, 2, settings), Admission(4, "b", 1, 1, 0, Settings())),
        (Lane(1, 0, (3, 1, 2), False), Lane(4, 0, (9,), True)),
        rounds=1,
        slots=2,
        active=(0, 2),
        released=(1,),
        preempted=("a",),
    )
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json().encode()) == plan
    assert Plan.from_json(Plan(0).to_json()) == Plan(0)
    assert "\n" not in plan.to_json()


def test_token_ids_of_numpy_become_plain():
    request = Request("a", np.array([3, 4], np.int32), 1)  # pyright: ignore[reportArgumentType]
    lane = Lane(0, 0, request.ids, True)
    assert Plan.from_json(Plan(0, lanes=(lane,)).to_json()).lanes == (lane,)
    with pytest.raises(TypeError):
        Request("a", (1.5,), 1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"groups": 0}, "groups is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"depth": -1}, "depth is -1"),
        ({"ahead": 2}, "ahead is 2"),
        ({"rounds": (2, 8)}, "ascend from 1"),
        ({"rounds": (1, 8, 2)}, "ascend from 1"),
        ({"slot_counts": (1, 2)}, "ascend to 3"),
        ({"slot_counts": (2, 1, 3)}, "ascend to 3"),
        ({"slot_counts": (0, 3)}, "ascend to 3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, cause):
    with pytest.raises(ValueError, match=cause):
        dataclasses.replace(SHAPE, **change)


def test_sizes_that_follow():
    assert (SHAPE.slots, SHAPE.capacity, SHAPE.slot_counts) == (6, 20, (3,))
    assert dataclasses.replace(SHAPE, tiles=9).capacity == 32
    assert [SHAPE.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [SHAPE.group(slot) for slot in range(6)] == [0, 0, 0, 1, 1, 1]


def test_requests_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"'a' has an empty prompt"):
        Request("a", (), 1)
    with pytest.raises(ValueError, match=r"'a' has a limit of -1"):
        Request("a", (1,), -1)


def test_a_table_row_ends_where_its_pages_end():
    table = SHAPE.table()
    assert (table == 8).all()
    assert (table.shape, table.dtype) == ((6, 5), np.int32)
    update_table(table, Plan(0, (TableRow(1, 0, (5, 0)), TableRow(5, 0, (1, 2, 3)))), SHAPE.no_page)
    update_table(table, Plan(1, (TableRow(1, 2, (7,)), TableRow(5, 0, (4,)))), SHAPE.no_page)
    assert table.tolist() == [[8] * 5, [5, 0, 7, 8, 8], [8] * 5, [8] * 5, [8] * 5, [4, 8, 8, 8, 8]]
