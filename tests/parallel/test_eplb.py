"""EPLB against the worked example its authors publish, and the balance it promises on skewed loads."""

import json

import numpy as np
import pytest

from kimi_jax.parallel.eplb import (
    balanced_placements,
    imbalance,
    load_placements,
    pack_evenly,
    rank_loads,
    rebalance,
    replicate,
    save_placements,
)
from kimi_jax.parallel.placement import Placement, even_placement

# README of deepseek-ai/EPLB: two layers of 12 experts, 16 replicas, 4 groups, 2 nodes of 4 GPUs, and its output.
LOADS = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
PUBLISHED = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]


def zipf(experts: int, seed: int = 0, offset: float = 20.0) -> np.ndarray:
    """Load e of rank r proportional to 1 / (r + offset), experts in random order."""
    return np.random.default_rng(seed).permutation(1e6 / (np.arange(1, experts + 1) + offset))


@pytest.mark.parametrize("layer", [0, 1])
def test_the_published_example(layer):
    np.testing.assert_array_equal(rebalance(LOADS[layer], 16, ranks=8, groups=4, nodes=2), PUBLISHED[layer])


def test_rank_loads_of_the_published_example():
    placements = balanced_placements(LOADS, ranks=8, num_slots=16, groups=4, nodes=2)
    np.testing.assert_allclose(rank_loads(placements[0], LOADS[0], 8), [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152])
    np.testing.assert_allclose(rank_loads(placements[1], LOADS[1], 8), [173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5])


def test_global_policy_where_nodes_do_not_divide_groups():
    """3 nodes cannot share 4 groups: the same as one node, and better balanced than the hierarchy above."""
    for loads in LOADS:
        globally = rebalance(loads, 24, ranks=6, groups=4, nodes=3)
        np.testing.assert_array_equal(globally, rebalance(loads, 24, ranks=6))
    # The published code puts both replicas of expert 1 on the last rank, and 3 beside 8.
    expected = [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 1, 1, 3]
    np.testing.assert_array_equal(rebalance(LOADS[0], 16, ranks=8), expected)
    by_rank = rank_loads(Placement(tuple(expected), 12), LOADS[0], 8)
    np.testing.assert_allclose(by_rank, [130.5, 95.5, 130, 138, 138.5, 134.5, 139, 127])


def test_replicas_go_to_the_highest_load_a_replica():
    assert replicate(np.array([10.0, 35.0, 12.0]), 6).tolist() == [0, 1, 2, 1, 1, 2]


def test_packing_is_even_in_number():
    packed = pack_evenly(np.array([9.0, 1, 1, 1, 8, 2]), 3)
    assert sorted(packed.reshape(-1).tolist()) == list(range(6))
    assert packed.tolist() == [[0, 3], [4, 2], [5, 1]]


@pytest.mark.parametrize(
    ("ranks", "slots", "bound"), [(8, 384, 1.005), (36, 396, 1.05), (64, 448, 1.01), (72, 432, 1.01)]
)
def test_balance_on_skewed_loads(ranks, slots, bound):
    """Where loads fall like Zipf's law, the fullest of 72 ranks is 1 % above the mean; unbalanced it has 2.3 times."""
    loads = zipf(384)
    (placement,) = balanced_placements(loads[None], ranks, slots)
    assert placement.num_slots == slots
    assert -1 not in placement.slot_experts
    balanced, before = imbalance(placement, loads, ranks), imbalance(even_placement(384, ranks), loads, ranks)
    assert balanced < bound
    assert before > 1.1
    assert balanced < before


def held_twice(slots: np.ndarray, ranks: int) -> int:
    return sum(len(rank) - len(set(rank)) for rank in np.asarray(slots).reshape(ranks, -1).tolist())


@pytest.mark.parametrize("seed", range(50))
def test_no_rank_holds_an_expert_twice(seed):
    """Loads of every kind, with ties and without any, over one node or several."""
    rng = np.random.default_rng(seed)
    skewed = rng.pareto(1.2, 384) * 100
    slots = rebalance(skewed, 432, 72)
    assert held_twice(slots, 72) == 0
    assert sorted(set(slots.tolist())) == list(range(384))
    for _ in range(10):
        nodes, each = int(rng.choice([1, 2, 4])), int(rng.integers(1, 5))
        groups, ranks = nodes * int(rng.integers(1, 4)), nodes * each
        experts = groups * int(rng.integers(1, 7))
        on_rank = -(-experts // ranks) + int(rng.integers(0, 4))
        powers = 10.0 ** rng.integers(0, 6, experts)
        for loads in (rng.pareto(0.5, experts), rng.integers(0, 3, experts), np.zeros(experts), powers):
            slots = rebalance(loads, on_rank * ranks, ranks, groups, nodes)
            assert set(slots.tolist()) == set(range(experts))
            assert held_twice(slots, ranks) == ranks * max(0, on_rank - experts // nodes)


def test_replicas_stop_at_one_a_rank():
    assert np.bincount(replicate(np.array([1000.0, 1, 1, 2]), 8, most=3)).tolist() == [3, 2, 1, 2]
    assert np.bincount(replicate(np.array([9.0, 1]), 8, most=3)).tolist() == [5, 3], "all have as many: it goes on"


def test_two_ranks_exchange_slots_where_the_last_one_with_room_holds_the_expert():
    packed = pack_evenly(np.array([9.0, 9, 8, 5, 5, 1]), 2, np.array([0, 1, 2, 3, 3, 3]))
    assert packed.tolist() == [[0, 2, 4], [1, 3, 5]], "three of a kind do not fit two packs"
    packed = pack_evenly(np.array([9.0, 5, 5, 5, 1, 1]), 2, np.array([0, 1, 2, 3, 4, 4]))
    assert held_twice(np.array([0, 1, 2, 3, 4, 4])[packed], 2) == 0


def test_nvl72_has_48_replicas_by_default():
    (placement,) = balanced_placements(zipf(384)[None], 72)
    assert placement.num_slots == 432
    counts = np.bincount(placement.slot_experts, minlength=384)
    assert counts.min() == 1
    assert counts.sum() - 384 == 48
    loads = zipf(384)
    assert loads[counts > 1].min() > np.median(loads)


def test_layers_are_balanced_by_their_own_loads():
    loads = np.stack([zipf(48, seed) for seed in range(3)])
    placements = balanced_placements(loads, 8, 56)
    assert len({placement.slot_experts for placement in placements}) == 3
    for layer, placement in enumerate(placements):
        own = imbalance(placement, loads[layer], 8)
        assert own < 1.05
        assert own < imbalance(placement, loads[layer - 1], 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(12), 11, 1), "11 slots cannot hold 12"),
        ((np.ones(12), 16, 5), "16 slots cannot be shared evenly by 5"),
        ((np.ones(12), 16, 8, 5), "12 experts cannot be shared evenly by 5"),
        ((np.ones(12), 16, 8, 4, 3), "8 ranks cannot be shared evenly by 3"),
        ((-np.ones(12), 16, 8), "not negative"),
    ],
)
def test_bad_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        rebalance(*arguments)


def test_placements_saved_and_loaded(tmp_path):
    placements = balanced_placements(LOADS, ranks=8, num_slots=16)
    save_placements(tmp_path / "placements.json", placements)
    loaded = load_placements(tmp_path / "placements.json", layers=2, num_experts=12, ranks=8)
    assert loaded == placements


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 3}, "made for 2 layers; the model has 3"),
        ({"num_experts": 16}, "made for 12 experts; the model has 16"),
        ({"ranks": 3}, "layer 0 has 16 slots, which 3 ranks"),
    ],
)
def test_placements_of_another_model_or_layout_are_refused(tmp_path, sizes, message):
    save_placements(tmp_path / "p.json", balanced_placements(LOADS, ranks=8, num_slots=16))
    with pytest.raises(ValueError, match=message):
        load_placements(tmp_path / "p.json", **({"layers": 2, "num_experts": 12, "ranks": 8} | sizes))


def test_files_that_are_no_placements_are_refused(tmp_path):
    file = tmp_path / "p.json"
    for text, message in (
        ("[]", "not a file of expert placements"),
        ("{", "not a file of expert placements"),
        (json.dumps({"format": "2", "num_experts": 1, "slot_experts": [[0]]}), "format is '2'"),
        (
            json.dumps({"format": "expert placements 1", "num_experts": 2, "slot_experts": [[0, 0]]}),
            "layer 0: no slot holds expert 1",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_placements(file, layers=1, num_experts=2, ranks=1)
