"""Where experts lie, and their moves while decoding, change no answer; moved weights are the weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kimi_jax.checkpoint.convert import to_orbax
from kimi_jax.checkpoint.sharded.manifest import read_manifest
from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.generate import Limits, shape_of
from kimi_jax.decoding.loading import open_checkpoint
from kimi_jax.decoding.rebalance import Rebalancer, fetch_slots, source_slots
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.session import Session
from kimi_jax.model.rows import causal_rows
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.eplb import balanced_placements, save_placements
from kimi_jax.parallel.placement import EMPTY, Placement, even_placement
from meshes.devices import build_mesh
from meshes.presets import Layout, preset

DATA = Path(__file__).parents[1] / "data"
CHECKPOINT, DRAFTER = DATA / "tiny_random", DATA / "tiny_random_drafter"
EXPERTS, LAYERS, SLOTS, TREE = 16, 3, 24, Draft("ddtree", 16)
MACHINE = preset("local").with_axes(dp=2, ep=2, tp=2)


def skewed(first: int) -> list[Placement]:
    """24 slots on 4 ranks with a replica of one expert on each, another one in each layer."""
    heavy = np.ones((LAYERS, EXPERTS))
    heavy[np.arange(LAYERS), first + np.arange(LAYERS)] = 1000
    return balanced_placements(heavy, MACHINE.layout.expert_ranks, SLOTS)


def open_tiny(placement=None, checkpoint=CHECKPOINT) -> Engine:
    mesh = build_mesh(MACHINE, jax.devices())
    return open_checkpoint(checkpoint, mesh, MACHINE.layout, jnp.float32, DRAFTER, placement=placement)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    """With a placement of its own for each layer, read from a file."""
    file = tmp_path_factory.mktemp("placement") / "placement.json"
    save_placements(file, skewed(first=2))
    return open_tiny(file)


def texts(engine: Engine, prompts, limits, draft=TREE):
    out = [[] for _ in prompts]
    for progress in engine.generate(prompts, limits, Sampling(), draft=draft):
        for row, new in enumerate(progress.new_tokens):
            out[row] += new
    return out


def test_any_placement_gives_the_same_logits(engine, forward, reference):
    assert [placement.count(2 + layer) for layer, placement in enumerate(engine.model.slot_experts.values())] == [4] * 3
    ids = jnp.asarray(reference["input_ids"])
    count, length = ids.shape
    rows = causal_rows(ids, jnp.zeros(count, jnp.int32), jnp.full(count, length, jnp.int32))
    np.testing.assert_allclose(forward(engine, rows).logits, reference["logits"], atol=1e-4)


def test_a_sharded_checkpoint_carries_its_placement(engine, tmp_path):
    """Read back as it was written; onto ranks that cannot share its slots in order, every expert once."""
    model = CausalLM(engine.config, skewed(first=2))
    to_orbax(
        CHECKPOINT, tmp_path / "out", model, engine.config.key_prefix,
        num_experts=EXPERTS, dtype="bfloat16", slot_experts=model.slot_experts,
    )  # fmt: skip
    assert read_manifest(tmp_path / "out").slot_experts == model.slot_experts
    again = open_tiny(checkpoint=tmp_path / "out")
    assert again.model.slot_experts == engine.model.slot_experts
    jax.tree.map(np.testing.assert_array_equal, again.parameters["target"], engine.parameters["target"])
    layout = Layout(ep=5)
    mesh = build_mesh(preset("local").with_layout(layout), jax.devices())
    other = open_checkpoint(tmp_path / "out", mesh, layout, jnp.float32)
    assert other.model.placement == even_placement(EXPERTS, 5)


def test_experts_move_between_rounds_and_the_text_does_not_change(engine, reference):
    """Starting from a bad placement: loads even out, every slot has its expert's weights, nothing is compiled again."""
    ids, limits = reference["greedy_ids"], Limits(max_new_tokens=20, rounds_per_dispatch=3)
    prompts, expected = ids[:, :8].tolist(), ids[:, 8:28].tolist()
    moving = engine.rebalancing(every=4)
    rebalancer = moving.rebalancer
    assert texts(moving, prompts, limits) == expected
    rounds = [move.round for move in rebalancer.moves]
    assert rounds == sorted({*rounds})
    assert {*rounds} <= {*range(4, 24, 4)}
    assert len(rebalancer.moves) <= rebalancer.looks
    for move in rebalancer.moves:
        assert move.slots > 0
        assert 1 <= move.after < move.before
    slots = sum(move.slots for move in rebalancer.moves)
    assert f"moved {len(rounds)} time{'s' * (len(rounds) > 1)} ({slots} slots" in rebalancer.summary()
    assert f"in {rebalancer.looks} looks" in rebalancer.summary()

    looked = rebalancer.looks
    assert texts(moving, prompts, limits) == expected, "from where the experts lie now, and on"
    assert rebalancer.looks > looked
    compiled = moving.programs(TREE)._compiled.values()
    assert [run._cache_size() for run in compiled] == [1] * len(compiled), "moved weights lie as loaded ones do"

    source = open_tiny().parameters["target"]["model"]["layers"]
    for layer, placement in rebalancer.placements.items():
        assert placement.slot_experts != engine.model.slot_experts[layer]
        stacks = moving.parameters["target"]["model"]["layers"][layer]["mlp"]["experts"]
        wanted = jax.tree.map(lambda x, held=placement: np.asarray(x)[list(held.slot_experts)],
                              source[layer]["mlp"]["experts"])  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, stacks), wanted)


def test_experts_stay_where_no_place_is_better(engine):
    """Loads that are even as they lie move nothing, and the summary says so."""
    moving = engine.rebalancing(every=4)
    rebalancer = moving.rebalancer
    assert rebalancer.summary() == "experts have not moved: fewer than 4 rounds were run"
    before = dict(rebalancer.placements)
    loads = np.stack([np.bincount(p.slot_experts, minlength=EXPERTS) for p in before.values()])
    rebalancer.consider(4, moving.parameters, loads)
    assert rebalancer.placements == before
    assert rebalancer.moves == []
    assert rebalancer.summary() == "experts have not moved: 1 look at the loads found no better places"
    loads[0, 0] += 1000
    rebalancer.consider(8, moving.parameters, loads)
    (move,) = rebalancer.moves
    assert move.after < move.before
    assert [rebalancer.placements[layer] == old for layer, old in before.items()] == [False, True, True]


def test_loads_are_the_references_choices(engine, reference):
    """Counted in chunks, on two replicas of two ranks; padding rows and empty requests count for nothing."""
    moving = engine.rebalancing(every=1000)
    prompts = reference["input_ids"].tolist()
    programs, limits = moving.programs(TREE), Limits(prefill_chunk=16)
    session = Session(programs, moving.parameters, shape_of(programs, [*map(len, prompts)], [1] * 3, limits))
    session.fill(prompts)
    loads = np.asarray(session.state.counters.loads)
    assert loads.shape == (4, LAYERS, EXPERTS)
    for layer in range(LAYERS):
        for request in range(3):
            chosen = reference[f"topk_ids.{layer + 1}"].reshape(3, len(prompts[0]), -1)[request]
            np.testing.assert_array_equal(loads[request, layer], np.bincount(chosen.reshape(-1), minlength=EXPERTS))
    assert not loads[3].any()


@pytest.mark.parametrize(("axes", "sizes"), [(("ep", "tp"), (2, 4)), (("ep",), (8, 1))])
def test_slots_are_fetched_from_any_rank(axes, sizes):
    """Every rank's slots from random ones, one slot wanted by all ranks, with columns cut over tp where it has any."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), ("ep", "tp"))
    stack = np.random.default_rng(0).integers(0, 1 << 30, (24, 2, 3)).astype(np.int32)
    sources = np.random.default_rng(1).integers(0, 24, 24).astype(np.int32)
    sources[::3] = 7
    spec = PartitionSpec(axes)
    fetch = jax.shard_map(
        lambda stack, sources: fetch_slots(stack, sources, axes),
        mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False,
    )  # fmt: skip
    run = jax.jit(fetch)
    np.testing.assert_array_equal(run(stack, sources), stack[sources])


def test_experts_that_stay_are_not_fetched():
    old, new = Placement((0, 1, 2, EMPTY, 1, 3), 4), Placement((0, 2, 1, 3, EMPTY, 3), 4)
    assert source_slots(old, new).tolist() == [0, 2, 1, 5, 4, 5]


def test_what_cannot_be_balanced_is_refused(engine):
    with pytest.raises(ValueError, match="every 0 rounds"):
        engine.rebalancing(every=0)
    with pytest.raises(ValueError, match="one rank holds all experts"):
        Rebalancer(engine.model, engine.mesh, Layout(), every=1)
