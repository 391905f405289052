"""Every kernel of both operations at full inner sizes: its PTX, executed, against the float32 reference."""

import dataclasses

import pytest

from meshes.hardware import gpu
from pallas_kernels import int4_moe, tree_attention
from pallas_kernels.operation import Case, Device, Operation, check
from pallas_kernels.registry import OPERATIONS
from ptx.emulate import Emulation, emulated
from ptx.machine import Order

LATE, EARLY = Order(), Order(early=frozenset({"copy", "store", "mma", "transfer"}))
OVERWRITING = Order(early=frozenset({"copy"}))
"""Copies land as soon as they are issued, products read their operands as late as they may."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A case of an operation, with whom it is run, and what must have happened."""

    operation: Operation
    implementation: str
    case: Case
    order: Order = LATE
    cards: tuple[str, ...] = ("h200", "gb300")
    wraps: bool = True


def experts(
    count, hidden, width, order=LATE, implementation="warp", *, slots=3, routing="random", cards=None, **options
):
    shape = int4_moe.Shape(count, 2, slots, hidden, width, slots + 1)
    case = Case(shape, {"routing": routing}, {"ctas": 3} | options)
    cards = cards or {"warp": ("h200", "gb300"), "hopper": ("h200",), "blackwell": ("gb300",)}[implementation]
    wraps = routing != "foreign" and max(hidden, width) > 512
    return Run(OPERATIONS["int4_moe"], implementation, case, order, cards, wraps)


def attention(
    filled, rows, heads, order=LATE, implementation="hopper", *, std=0.5, trees=None, positions=256, page=64, **options
):
    shape = tree_attention.Shape(len(filled), rows, heads, positions, filled, page=page)
    problem = {"query_std": std} | ({"trees": trees} if trees else {})
    case = Case(shape, problem, {"min_tiles": 1} | options)
    cards = {"hopper": ("h200",), "blackwell": ("gb300",)}[implementation]
    return Run(OPERATIONS["tree_attention"], implementation, case, order, cards, max(filled) > 64 * 5)


RUNS = {
    "gate and up at full k": experts(9, 7168, 256, Order(1), slots=2, ctas=2, cards=("h200",)),
    "hopper 16": experts(12, 1024, 256, OVERWRITING, "hopper", rows=16, stages=2),
    "blackwell 16": experts(12, 1024, 256, LATE, "blackwell", rows=16, stages=2),
    "attention cluster": attention((100, 0), 9, 8, Order(3), "hopper", splits=3),
    "attention blackwell": attention((100, 0), 9, 8, LATE, "blackwell", splits=3),
}
SLOW = {
    "gate and up at full k, late": experts(9, 7168, 256, LATE),
    "down at full k": experts(9, 512, 2048, OVERWRITING),
    "a width of 64": experts(9, 7168, 64, EARLY),
    "k shared by CTAs": experts(5, 7168, 256, OVERWRITING, split=4),
    "no row": experts(5, 1024, 256, LATE, routing="foreign"),
    **{
        f"{engine} {rows}": experts(rows + 8, 7168, 256, order, engine, slots=2, rows=rows)
        for engine in ("hopper", "blackwell")
        for rows, order in ((16, OVERWRITING), (32, Order(2)), (64, LATE))
    },
    **{
        f"{engine} 64, width 64": experts(70, 2048, 64, EARLY, engine, rows=64, stages=2)
        for engine in ("hopper", "blackwell")
    },
    "attention hopper": attention((100, 256, 0), 1, 8, LATE, "hopper"),
    "attention cluster, late": attention((450, 256, 0), 17, 8, OVERWRITING, "hopper", positions=512, splits=3),
    "attention cluster, small pages": attention((100, 20), 9, 8, Order(6), "hopper", page=32, splits=2),
    "attention blackwell, small pages": attention((100, 20), 9, 8, Order(6), "blackwell", page=32, splits=2),
    "attention blackwell, early": attention((450, 256, 0), 17, 8, EARLY, "blackwell", positions=512, splits=3),
    "attention blackwell, peaked": attention((256, 190), 9, 4, Order(4), "blackwell", std=20.0, splits=2),
}


EXHAUSTIVE = {
    "warp, a whole expert": experts(9, 7168, 2048, Order(5), slots=2, cards=("h200", "b200", "gb300")),
    "hopper 64, a whole expert": experts(70, 7168, 2048, Order(5), "hopper", slots=2, rows=64),
    "blackwell 64, a whole expert": experts(
        70, 7168, 2048, Order(5), "blackwell", slots=2, rows=64, cards=("b200", "gb300")
    ),
}


def parameters():
    for runs, marks in ((RUNS, []), (SLOW, [pytest.mark.slow]), (EXHAUSTIVE, [pytest.mark.exhaustive])):
        for name, run in runs.items():
            for card in run.cards:
                yield pytest.param(run, card, id=f"{name}-{card}", marks=marks)


def compute(run: Run, card: str, **options) -> Emulation:
    facts = gpu(card)
    device = Device(facts.device_kind, "{}.{}".format(*facts.compute_capability), 3)
    with emulated(card, order=run.order, **options) as emulation:
        check(run.operation, "emulated", run.case, device, run.implementation)
    return emulation


@pytest.mark.parametrize(("run", "card"), list(parameters()))
def test_the_ptx_computes_the_operation(run, card):
    emulation = compute(run, card)
    phases = [p for call in emulation.calls for p in call.result.phases]
    if run.wraps:  # each slot of some ring was filled three times
        assert max(phases) >= 3
