"""What `self_check` runs on a card, counted; and the faults that the tolerances must see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from meshes.hardware import gpu
from meshes.targets import TARGETS
from pallas_kernels import int4_moe, tree_attention
from pallas_kernels.int4_moe import registers
from pallas_kernels.operation import Case, Device, check, differences, self_check
from pallas_kernels.tree_attention import registers as softmax
from pallas_kernels.tree_attention import schedule
from pallas_kernels.tree_attention.tile import BLOCK, STAGES

EXPERTS, ATTENTION = int4_moe.OPERATION, tree_attention.OPERATION
H200, GB300 = Device("NVIDIA H200", "9.0", 3), Device("NVIDIA GB300", "10.3", 3)


def card(name: str) -> Device:
    facts = gpu(name)
    return Device(facts.device_kind, "{}.{}".format(*facts.compute_capability), facts.core_count)


@pytest.mark.parametrize("name", TARGETS)
def test_the_experts_check_wraps_rings_and_has_second_items(name):
    seen = {}
    for implementation, case_name in EXPERTS.trials(card(name), EXPERTS.checks):
        case = EXPERTS.checks[case_name]
        shape = case.shape
        config = EXPERTS.choose(shape, jnp.bfloat16, card(name), implementation, case.options).config
        ids = np.asarray(EXPERTS.problem(shape)[1])
        counts = np.bincount(ids[ids < shape.slots], minlength=shape.slots)
        tiles = int(np.sum(-(-counts // config.gate_up.rows)))
        for kind, tile, out, k in (
            ("gate_up", config.gate_up, shape.width, shape.hidden),
            ("down", config.down, shape.hidden, shape.width),
        ):
            blocks = out // (64 * tile.warpgroups * (1 if kind == "gate_up" else 2))
            items = tiles * blocks * tile.split // config.ctas
            steps = items * (k // tile.k_step // tile.split)
            found = seen.setdefault((implementation, kind), {"rows": set(), "split": set(), "flat": set()})
            assert items >= 2
            assert steps > 2 * tile.stages, (implementation, kind, case_name)
            found["rows"].add(tile.rows)
            found["split"].add(tile.split)
            found["flat"].add(tile.k_step < 256)
    for (implementation, kind), found in seen.items():
        assert found["rows"] == ({8} if implementation == "warp" else {16, 32, 64})
        assert found["flat"] == {False, True}
        assert found["split"] == ({1, 2} if kind == "gate_up" else {1})


@pytest.mark.parametrize("name", TARGETS)
def test_the_attention_check_reuses_buffers_cuts_and_spans_requests_and_shares_copies(name):
    clusters, spans, cuts, empty, most_tiles, most_parts = set(), 0, 0, 0, [], 0
    for implementation, case_name in ATTENTION.trials(card(name), ATTENTION.checks):
        case = ATTENTION.checks[case_name]
        shape = case.shape
        config = ATTENTION.choose(shape, jnp.bfloat16, card(name), implementation, case.options).config
        lengths = jnp.asarray(shape.lengths, jnp.int32)
        tables = schedule.plan(lengths, -(-shape.rows // BLOCK), BLOCK, config.splits, config.min_tiles)
        low, high, first, end = np.asarray(tables.pieces).T
        cut, first_part, end_part = np.asarray(tables.joins).T
        clusters.add(config.cluster)
        spans += int(np.sum(end - first > 1))
        cuts += int(np.sum(cut >= 0))
        empty += int(np.sum(low == high))
        most_tiles.append(int(np.max(high - low)))
        most_parts = max(most_parts, int(np.max((end_part - first_part)[cut >= 0])))
    assert min(most_tiles) > 2 * STAGES
    assert max(most_tiles) > 5 * STAGES
    assert spans >= 2
    assert cuts >= 3
    assert empty >= 1
    assert most_parts > schedule.UNROLL
    assert clusters == ({1, 2} if card(name).architecture == "hopper" else {1})


@pytest.mark.parametrize("name", TARGETS)
def test_few_programs_are_lowered_when_a_checkpoint_is_opened(name):
    # Two for warp and three for the tensor core, four kernels each; two of attention, two kernels each.
    assert [len(operation.trials(card(name), operation.checks)) for operation in (EXPERTS, ATTENTION)] == [5, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", [H200, GB300], ids=lambda device: device.kind)
def test_the_experts_check_passes_in_the_interpreter(device):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    assert len(self_check(EXPERTS, device, interpret=interpret)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("device", [H200, GB300], ids=lambda device: device.kind)
def test_the_attention_check_passes_in_the_interpreter_on_shorter_contexts(device):
    small = {
        name: dataclasses.replace(
            case,
            shape=dataclasses.replace(
                case.shape, positions=case.shape.positions // 16, filled=tuple(n // 16 for n in case.shape.lengths),
                kv_lora_rank=128,
            ),
        )
        for name, case in ATTENTION.checks.items()
    }  # fmt: skip
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    assert len(self_check(dataclasses.replace(ATTENTION, checks=small), device, interpret=interpret)) == 2


def test_a_lost_tile_of_a_long_context_is_seen():
    shape = tree_attention.Shape(1, 1, 2, 32768, kv_lora_rank=32, rope=8)
    arguments = list(ATTENTION.problem(shape))
    want = jax.jit(ATTENTION.reference)(*arguments)
    arguments[5] -= BLOCK
    out, lse = differences(jax.jit(ATTENTION.reference)(*arguments), want)
    assert ATTENTION.tolerances[0].exceeded(out)
    assert ATTENTION.tolerances[1].exceeded(lse)
    assert lse.absolute < 4e-3  # about 64 / 32,768: ten times the tolerance, and no more


def test_one_zeroed_element_in_half_a_million_is_seen():
    rng = np.random.default_rng(0)
    want = rng.normal(size=(64, 7168)).astype(np.float32)
    rounded = want * (1 + rng.uniform(-1, 1, want.shape).astype(np.float32) * 2**-8)
    assert EXPERTS.tolerances[0].exceeded(differences(rounded, want)[0]) == []
    rounded[17, 4000] = 0 if abs(want[17, 4000]) > 0.1 else 1
    (found,) = differences(rounded, want)
    assert found.frobenius < 4e-3  # the norm alone does not see it
    assert EXPERTS.tolerances[0].exceeded(found)


def replaced(module, name, wrong):
    """A fault: a function of a module, which `wrong` gets as its first argument."""
    return module, name, functools.partial(wrong, getattr(module, name))


def next_scale(right, scale, group, half):
    return right(scale, group ^ 1, half)


def other_half(right, ops, word, b):
    return right(ops, word, b ^ 1)


def units_swapped(right, ops, acc):
    return right(ops, acc)[::-1]


def one_row_further(right, scores, tile, context_tiles, length, *rest):
    return right(scores, tile, context_tiles, length + 1, *rest)


def off_by_little(right, maximum, total, valid):
    inverse, lse = right(maximum, total, valid)
    return inverse, lse + 2e-3


def first_of_a_piece(right, piece, request, first_request):
    return 2 * piece


def page_of_the_tile_before(right, pages, request, tile, per_tile):
    return right(pages, request, jnp.maximum(tile - 1, 0), per_tile)


SMALL_EXPERTS = Case(int4_moe.Shape(11, 2, 3, 128, 64, 4), {}, {"stages": 2, "ctas": 2})
SMALL_ATTENTION = Case(
    tree_attention.Shape(2, 3, 8, 136, (136, 70), kv_lora_rank=128), {}, {"splits": 3, "min_tiles": 1}
)
FAULTS = {
    "a neighbour's scale": (replaced(registers, "_scale_word", next_scale), ("warp", "hopper", "blackwell")),
    "nibbles swapped": (replaced(registers, "_codes", other_half), ("warp", "hopper", "blackwell")),
    "an offset of 7": ((registers, "OFFSET", 0x4307_4307), ("hopper", "blackwell")),
    "a negative offset of 137": ((registers, "NEGATIVE_OFFSET", 0xC309_C309), ("warp",)),
    "gate for up": (replaced(registers, "split_units", units_swapped), ("blackwell",)),
    "a position past the length": (
        replaced(softmax, "hide", one_row_further),
        ("hopper attention", "blackwell attention"),
    ),
    "the page of the tile before": (
        replaced(schedule, "page_numbers", page_of_the_tile_before),
        ("hopper attention", "blackwell attention"),
    ),
    "a log-sum-exp off by 1.4e-3": (
        replaced(softmax, "normaliser", off_by_little),
        ("hopper attention", "blackwell attention"),
    ),
    "a part in another's place": (
        replaced(softmax, "segment", first_of_a_piece),
        ("hopper attention", "blackwell attention"),
    ),
}
DEFAULT = {("a neighbour's scale", "warp"), ("the page of the tile before", "hopper attention")}


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        pytest.param(name, where, marks=[] if (name, where) in DEFAULT else pytest.mark.slow)
        for name, (_, places) in FAULTS.items()
        for where in places
    ],
)
def test_seeded_faults_exceed_the_tolerances(fault, where, monkeypatch):
    implementation, _, of_attention = where.partition(" ")
    operation, case = (ATTENTION, SMALL_ATTENTION) if of_attention else (EXPERTS, SMALL_EXPERTS)
    monkeypatch.setattr(*FAULTS[fault][0])
    device = GB300 if implementation == "blackwell" else H200
    with pytest.raises(RuntimeError, match=f"{operation.name} is wrong on"):
        check(operation, fault, case, device, implementation, plgpu.InterpretGPUParams())
