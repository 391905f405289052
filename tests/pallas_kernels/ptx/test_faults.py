"""Faults seeded in the PTX itself, one at a time: each must be seen, by a value or by what the machine reports."""

import dataclasses
import re

import pytest

from ptx.kernel import Kernel
from ptx.machine import Order
from ptx.test_kernels import LATE, OVERWRITING, Run, attention, compute, experts

WARP = experts(9, 512, 256, implementation="warp", stages=2, cards=("h200",))
HOPPER = experts(12, 512, 256, implementation="hopper", rows=16, stages=2)
BLACKWELL = experts(12, 512, 256, implementation="blackwell", rows=16, stages=2)
ATTENTION = attention((100, 64), 1, 8)
TREE = attention((200, 0), 1, 8, implementation="blackwell")


def replaced(pattern: str, replacement: str, which: int = 0):
    """A change of the PTX: of the matches of a pattern, the one of this number is replaced."""

    def change(text: str) -> str:
        found = list(re.finditer(pattern, text, re.S))
        at = found[which]
        return text[: at.start()] + at.expand(replacement) + text[at.end() :]

    return change


SEEN = r"differs from the reference|DeadlockError|EmulationError"
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 (\w+), \[(%\w+)\], (%\w+), (%\w+);"
ALWAYS = r"setp.eq.b32 \1, 0, 0;"
FAULTS = {
    "a bit of lop3's table": (WARP, "int4_gate_up", replaced(r"(lop3\.b32[^;]*), 0xEA;", r"\1, 0xEB;", 5), LATE),
    "a shift of four": (WARP, "int4_gate_up", replaced(r"(shr\.u32 \t%r\d+, %r\d+), 8;", r"\1, 12;", 3), LATE),
    "mma: two registers exchanged": (
        WARP,
        "int4_gate_up",
        replaced(r"(mma\.sync\S+\s+\{[^}]*\},\s*\{)(%\w+),\s*(%\w+),", r"\1\3, \2,", -1),
        LATE,
    ),
    "no wait for the copy": (WARP, "int4_gate_up", replaced(WAIT, ALWAYS, -1), LATE),
    "no wait for a free slot": (WARP, "int4_gate_up", replaced(WAIT, ALWAYS, 0), OVERWRITING),
    "a wait for the other phase": (
        WARP,
        "int4_gate_up",
        replaced(WAIT, r"xor.b32 \3, \3, 1; mbarrier.try_wait.parity.shared.b64 \1, [\2], \3, \4;", -1),
        LATE,
    ),
    "16 bytes too many expected": (
        WARP,
        "int4_gate_up",
        replaced(r"(expect_tx\S* _, \[%\w+\]), (%\w+);", r"\1, 32;", 0),
        LATE,
    ),
    "an arrival too few in a barrier's count": (
        WARP,
        "int4_gate_up",
        replaced(r"mov\.b32 \t(%r\d+), 640;", r"mov.b32 \t\1, 639;"),
        LATE,
    ),
    "a descriptor 32 bytes off": (
        HOPPER,
        "int4_gate_up",
        replaced(r"(wgmma\.mma_async[^;]*\}, )(%rd\d+)(, p,)", r"add.s64 \2, \2, 2; \1\2\3", 1),
        LATE,
    ),
    "another swizzle in a descriptor": (
        BLACKWELL,
        "int4_gate_up",
        replaced(r"(mov\.b64 b_desc, \{b_desc_low, )1073742080", r"\g<1>2147483904", 0),
        LATE,
    ),
    "tensor memory read a column off": (
        BLACKWELL,
        "int4_gate_up",
        replaced(r"add\.s32 a_desc_low, (%r\d+), 8;", r"add.s32 a_desc_low, \1, 9;"),
        LATE,
    ),
    "no wait for stores to tensor memory": (
        BLACKWELL,
        "int4_gate_up",
        replaced(r"tcgen05\.wait::st\.sync\.aligned;", ""),
        Order(early=frozenset({"mma"})),
    ),
    "no wait for wgmma": (
        ATTENTION,
        "tree_attention_hopper",
        replaced(r"wgmma\.wait_group\.sync\.aligned 0;", "", -1),
        LATE,
    ),
    "probabilities handed over without a wait": (
        ATTENTION,
        "tree_attention_hopper",
        replaced(WAIT, ALWAYS, -1),
        LATE,
    ),
    "no arrival after the products": (TREE, "tree_attention_blackwell", replaced(r"tcgen05\.commit[^;]*;", ""), LATE),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_ptx_is_seen(fault):
    run, kernel, change, order = FAULTS[fault]

    def edit(name: str, found: Kernel) -> Kernel:
        if name != kernel:
            return found
        text = change(found.ptx)
        assert text != found.ptx
        return Kernel(text, found.host_ir)

    run = dataclasses.replace(run, order=order)
    with pytest.raises(Exception, match=SEEN):
        compute(run, run.cards[0], edit=edit)


@pytest.mark.slow
@pytest.mark.parametrize("run", [WARP, HOPPER, BLACKWELL, ATTENTION, TREE])
@pytest.mark.parametrize("order", [LATE, OVERWRITING, Order(early=frozenset({"mma"}))], ids=["late", "copy", "mma"])
def test_without_a_fault_nothing_is_seen(run: Run, order: Order):
    compute(dataclasses.replace(run, order=order), run.cards[0])
