"""Slots: every expert served, none of the empty slots ever chosen, ranks even."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parallel.placement import EMPTY, Placement, even_placement


@pytest.mark.parametrize(("ranks", "slots", "empty"), [(1, 384, 0), (16, 384, 0), (36, 396, 12), (72, 432, 48)])
def test_k26_experts_over_ranks(ranks, slots, empty):
    placement = even_placement(384, ranks)
    assert placement.num_slots == slots
    held = np.array(placement.slot_experts).reshape(ranks, -1)
    assert (held == EMPTY).sum() == empty
    assert (held == EMPTY).sum(1).max() <= 1
    assert sorted(held[held != EMPTY]) == list(range(384))
    chosen = np.asarray(placement.slots_of(jnp.arange(384)))
    np.testing.assert_array_equal(np.array(placement.slot_experts)[chosen], np.arange(384))


def test_an_expert_without_a_slot_is_refused():
    with pytest.raises(ValueError, match="expert 1"):
        Placement((0, 2, EMPTY), 3)


def test_an_unknown_expert_is_refused():
    with pytest.raises(ValueError, match="expert 3; there are experts 0 to 2"):
        Placement((0, 2, 1, 3), 3)


def test_replicas_take_turns_by_row():
    placement = Placement((1, 0, 2, 1, EMPTY, 1), 3)
    experts = jnp.asarray([[1, 0], [1, 2], [0, 1], [1, 1]])
    np.testing.assert_array_equal(placement.slots_of(experts), [[0, 1], [3, 2], [1, 5], [0, 0]])
