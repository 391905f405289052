"""Every scalar instruction, in hand-written PTX, against its definition in the PTX manual, thread by thread."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ptx import tables
from ptx.memory import EmulationError
from ptx.parser import PtxError
from ptx.snippet import run

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 2**32, (3, 32), dtype=np.uint64)
WORDS[:, :6] = [[0, 1, 2**31, 2**31 - 1, 2**32 - 1, 5], [0, 2**32 - 1, 2**31, 1, 2**32 - 1, 33], [7, 0, 1, 31, 32, 64]]
FLOATS = np.concatenate([RANDOM.normal(size=(3, 25)), np.tile([0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 1], (3, 1))], 1)
FLOATS[1, 25:] = [1, 0, 1, np.inf, 2, 3, np.nan]
FLOATS = FLOATS.astype(np.float32)
BITS = FLOATS.view(np.uint32)
M = 2**32


def signed(x, width=32):
    x &= 2**width - 1
    return x - 2**width if x >> (width - 1) else x


def byte_permute(a, b, selector):
    source = [(a | b << 32) >> 8 * i & 255 for i in range(8)]
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    return sum((source[c & 7] if c < 8 else 255 * (source[c & 7] >> 7)) << 8 * i for i, c in enumerate(chosen))


def extracted(a, place, count, is_signed):
    """The manual's loop over the bits."""
    place, count = place & 255, count & 255
    sign = a >> min(place + count - 1, 31) & 1 if is_signed and count else 0
    return sum((a >> place + i & 1 if i < count and place + i <= 31 else sign) << i for i in range(32))


INTEGERS = {
    "add.s32 %r9, %r0, %r1": lambda a, b, c: a + b,
    "sub.s32 %r9, %r0, %r1": lambda a, b, c: a - b,
    "mul.lo.s32 %r9, %r0, %r1": lambda a, b, c: a * b,
    "mul.hi.s32 %r9, %r0, %r1": lambda a, b, c: signed(a) * signed(b) >> 32,
    "mul.hi.u32 %r9, %r0, %r1": lambda a, b, c: a * b >> 32,
    "mad.lo.s32 %r9, %r0, %r1, %r2": lambda a, b, c: a * b + c,
    "and.b32 %r9, %r0, %r1": lambda a, b, c: a & b,
    "or.b32 %r9, %r0, %r1": lambda a, b, c: a | b,
    "xor.b32 %r9, %r0, %r1": lambda a, b, c: a ^ b,
    "not.b32 %r9, %r0": lambda a, b, c: ~a,
    "neg.s32 %r9, %r0": lambda a, b, c: -a,
    "abs.s32 %r9, %r0": lambda a, b, c: abs(signed(a)),
    "min.s32 %r9, %r0, %r1": lambda a, b, c: min(signed(a), signed(b)),
    "max.u32 %r9, %r0, %r1": lambda a, b, c: max(a, b),
    "max.relu.s32 %r9, %r0, %r1": lambda a, b, c: max(signed(a), signed(b), 0),
    "shl.b32 %r9, %r0, %r2": lambda a, b, c: a << c if c < 32 else 0,
    "shr.u32 %r9, %r0, %r2": lambda a, b, c: a >> c,
    "shr.s32 %r9, %r0, %r2": lambda a, b, c: signed(a) >> c,
    "lop3.b32 %r9, %r0, %r1, %r2, 0xEA": lambda a, b, c: a & b | c,
    "lop3.b32 %r9, %r0, %r1, %r2, 0x96": lambda a, b, c: a ^ b ^ c,
    "lop3.b32 %r9, %r0, %r1, %r2, 0x1B": lambda a, b, c: sum(
        (0x1B >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)
    ),
    "bfe.u32 %r9, %r0, 5, 9": lambda a, b, c: a >> 5 & 0x1FF,
    "bfe.u32 %r9, %r0, 28, 9": lambda a, b, c: a >> 28,
    "bfe.u32 %r9, %r0, %r1, %r2": lambda a, b, c: extracted(a, b, c, False),
    "bfe.s32 %r9, %r0, 0, 29": lambda a, b, c: signed(a << 3 & M - 1) >> 3 & M - 1,
    "bfe.s32 %r9, %r0, %r1, %r2": lambda a, b, c: extracted(a, b, c, True),
    "mov.b64 %d9, {%r0, %r1}; bfe.u64 %d9, %d9, 4, 14; cvt.u32.u64 %r9, %d9": lambda a, b, c: a >> 4 & 0x3FFF,
    "prmt.b32 %r9, %r0, %r1, 0x3210": lambda a, b, c: a,
    "prmt.b32 %r9, %r0, %r1, 0x5410": lambda a, b, c: a & 0xFFFF | (b & 0xFFFF) << 16,
    "prmt.b32 %r9, %r0, %r1, %r2": byte_permute,
    "setp.lt.s32 %p1, %r0, %r1; selp.b32 %r9, %r2, 7, %p1": lambda a, b, c: c if signed(a) < signed(b) else 7,
    "setp.hi.u32 %p1, %r0, %r1; selp.b32 %r9, %r2, 7, %p1": lambda a, b, c: c if a > b else 7,
    "setp.ge.u32 %p2, %r2, 9; setp.eq.and.b32 %p1, %r0, %r1, %p2; selp.b32 %r9, 1, 0, %p1": lambda a, b, c: int(
        a == b and c >= 9
    ),
    "setp.ne.b32 %p1, %r0, 0; not.pred %p2, %p1; @%p2 bra skip; mov.b32 %r0, %r1; skip: mov.b32 %r9, %r0": (
        lambda a, b, c: b if a else a
    ),
    "cvt.s64.s32 %d9, %r0; cvt.u32.u64 %r9, %d9; shr.s64 %d9, %d9, 32; cvt.u32.u64 %r8, %d9; xor.b32 %r9, %r9, %r8": (
        lambda a, b, c: a ^ (M - 1 if a >> 31 else 0)
    ),
    "mul.wide.s32 %d9, %r0, %r1; shr.u64 %d9, %d9, 20; cvt.u32.u64 %r9, %d9": lambda a, b, c: (
        (signed(a) * signed(b) & 2**64 - 1) >> 20
    ),
    "mul.wide.u32 %d9, %r0, %r1; shr.u64 %d9, %d9, 20; cvt.u32.u64 %r9, %d9": lambda a, b, c: a * b >> 20,
    "mov.b64 %d9, {%r0, %r1}; mad.lo.s64 %d9, %d9, 3, %d2; mov.b64 {%r8, %r9}, %d9": lambda a, b, c: (
        (a + (b << 32)) * 3 + c >> 32
    ),
    "mov.b64 %d9, {%r0, %r1}; mul.hi.u64 %d9, %d9, %d9; cvt.u32.u64 %r9, %d9": lambda a, b, c: (
        (a + (b << 32)) ** 2 >> 64
    ),
    "cvt.u16.u32 %h1, %r0; mul.lo.s16 %h1, %h1, 3; cvt.u32.u16 %r9, %h1": lambda a, b, c: (a & 0xFFFF) * 3 & 0xFFFF,
    "cvt.u16.u32 %h1, %r0; mul.hi.u16 %h1, %h1, 43691; cvt.u32.u16 %r9, %h1": lambda a, b, c: (
        (a & 0xFFFF) * 43691 >> 16
    ),
    "cvt.s8.s32 %h1, %r0; cvt.s32.s16 %r9, %h1": lambda a, b, c: signed(a, 8),
    "cvt.u8.u32 %h1, %r0; cvt.u32.u8 %r9, %h1": lambda a, b, c: a & 255,
    "cvt.rn.f32.s32 %r9, %r0": lambda a, b, c: int(np.float32(signed(a)).view(np.uint32)),
}


@pytest.mark.parametrize("body", INTEGERS)
def test_integers(body):
    (got,) = run(body + ";", WORDS, ["%r9"])
    assert got.tolist() == [INTEGERS[body](*map(int, w)) % M for w in WORDS.T]


def flushed(x):
    return np.copysign(np.float32(0), x) if abs(x) < 2.0**-126 else x


def fmax(a, b):
    return b if np.isnan(a) else a if np.isnan(b) else max(a, b)


F = np.float32
REALS = {
    "add.f32 %r9, %r0, %r1": lambda a, b, c: F(a + b),
    "sub.rn.f32 %r9, %r0, %r1": lambda a, b, c: F(a - b),
    "mul.f32 %r9, %r0, %r1": lambda a, b, c: F(a * b),
    "mul.ftz.f32 %r9, %r0, %r1": lambda a, b, c: flushed(F(flushed(a) * flushed(b))),
    "fma.rn.f32 %r9, %r0, %r1, %r2": lambda a, b, c: F(np.float64(a) * np.float64(b) + np.float64(c)),
    "neg.f32 %r9, %r0": lambda a, b, c: F(-a),
    "abs.f32 %r9, %r0": lambda a, b, c: F(abs(a)),
    "max.f32 %r9, %r0, %r1": lambda a, b, c: fmax(a, b),
    "min.f32 %r9, %r0, %r1": lambda a, b, c: -fmax(-a, -b),
    "max.NaN.f32 %r9, %r0, %r1": lambda a, b, c: F(np.nan) if np.isnan(a + b) and np.isnan([a, b]).any() else max(a, b),
    "max.NaN.f32 %r9, %r0, %r1, %r2": lambda a, b, c: F(np.nan) if np.isnan([a, b, c]).any() else max(a, b, c),
    "ex2.approx.ftz.f32 %r9, %r0": lambda a, b, c: flushed(F(2.0 ** np.float64(flushed(a)))),
    "lg2.approx.f32 %r9, %r0": lambda a, b, c: F(np.log2(np.float64(a))),
    "rcp.approx.f32 %r9, %r0": lambda a, b, c: F(1 / a),
    "rsqrt.approx.f32 %r9, %r0": lambda a, b, c: F(1 / np.sqrt(np.float64(a))),
    "sqrt.rn.f32 %r9, %r0": lambda a, b, c: F(np.sqrt(a)),
    "div.rn.f32 %r9, %r0, %r1": lambda a, b, c: F(a / b),
    "setp.lt.f32 %p1, %r0, %r1; selp.f32 %r9, 0f3F800000, 0f40000000, %p1": lambda a, b, c: F(1 if a < b else 2),
    "setp.leu.f32 %p1, %r0, %r1; selp.f32 %r9, 0f3F800000, 0f40000000, %p1": lambda a, b, c: F(
        1 if a <= b or np.isnan([a, b]).any() else 2
    ),
    "setp.ne.f32 %p1, %r0, %r1; selp.f32 %r9, 0f3F800000, 0f40000000, %p1": lambda a, b, c: F(
        1 if a != b and not np.isnan([a, b]).any() else 2
    ),
    "setp.neu.f32 %p1, %r0, %r1; selp.f32 %r9, 0f3F800000, 0f40000000, %p1": lambda a, b, c: F(1 if a != b else 2),
    "mov.b64 %d8, {%r0, %r1}; mov.b64 %d9, {%r2, %r2}; mul.rn.f32x2 %d9, %d8, %d9; mov.b64 {%r8, %r9}, %d9": (
        lambda a, b, c: F(b * c)
    ),
    "mov.b64 %d8, {%r0, %r1}; mov.b64 %d9, {%r2, %r2}; fma.rn.f32x2 %d9, %d8, %d9, %d8; mov.b64 {%r9, %r8}, %d9": (
        lambda a, b, c: F(np.float64(a) * np.float64(c) + np.float64(a))
    ),
}


@pytest.mark.parametrize("body", REALS)
def test_reals(body):
    (got,) = run(body + ";", BITS, ["%r9"])
    with np.errstate(all="ignore"):
        want = np.array([REALS[body](*f) for f in FLOATS.T], np.float32)
    exact = "approx" not in body
    np.testing.assert_allclose(got.astype(np.uint32).view(np.float32), want, rtol=0 if exact else 1e-6)


def test_bfloat16():
    bf = ml_dtypes.bfloat16
    body = (
        "cvt.rn.bf16x2.f32 %r7, %r1, %r0; cvt.rn.bf16.f32 %h1, %r2; cvt.u32.u16 %r8, %h1;"
        "mov.b32 %r9, {%h1, %h1}; mul.rn.bf16x2 %r9, %r7, %r9; sub.rn.bf16x2 %r6, %r7, %r9;"
    )
    both, one, product, difference = run(body, BITS, ["%r7", "%r8", "%r9", "%r6"])
    a, b, c = FLOATS.astype(bf)
    word = lambda low, high: np.stack([low, high], -1).astype(bf)  # noqa: E731
    as_bf = lambda x: x.astype(np.uint32).view(bf).reshape(-1, 2).astype(np.float32)  # noqa: E731
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(as_bf(both), word(a, b).astype(np.float32))
        np.testing.assert_array_equal(one.astype(np.uint16).view(bf).astype(np.float32), c.astype(np.float32))
        np.testing.assert_array_equal(as_bf(product), word(a * c, b * c).astype(np.float32))
        np.testing.assert_array_equal(as_bf(difference), word(a - a * c, b - b * c).astype(np.float32))


def shuffled(mode, lane, b, c):
    """The manual's pseudo-code."""
    segment, value, clamp = c >> 8 & 31, b & 31, c & 31
    most, least = lane & segment | clamp & ~segment, lane & segment
    j = {"up": lane - value, "down": lane + value, "bfly": lane ^ value, "idx": least | value & ~segment}[mode]
    inside = j >= most if mode == "up" else j <= most
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["idx", "bfly", "up", "down"])
@pytest.mark.parametrize("c", [0x1F, 0x0, 0x181F, 0x1C1F, 0x100F])
def test_shuffles(mode, c):
    if mode == "up":
        c &= 0x1F00
    got, inside = run(f"shfl.sync.{mode}.b32 %r9|%p1, %r0, %r1, {c}, -1;", WORDS[:2], ["%r9", "%p1"])
    want = [shuffled(mode, lane, int(WORDS[1, lane]), c) for lane in range(32)]
    assert got.tolist() == [int(WORDS[0, j]) for j, _ in want]
    assert inside.tolist() == [int(i) for _, i in want]


def test_one_lane_of_a_warp_is_elected():
    lane, leads = run("elect.sync %r9|%p1, -1;", [], ["%r9", "%p1"], threads=64)
    assert lane.tolist() == [0] * 64
    assert np.nonzero(leads)[0].tolist() == [0, 32]


def test_threads_part_and_meet():
    """Trip counts of each thread's own, in and after a branch that only some take."""
    body = """
    mov.b32 %r9, 0;
    setp.eq.b32 %p1, %r1, 0;
    @%p1 bra after;
    again: add.s32 %r9, %r9, %r0;
    add.s32 %r1, %r1, -1;
    setp.gt.s32 %p2, %r1, 0;
    @%p2 bra again;
    add.s32 %r9, %r9, 1000;
    after: shfl.sync.idx.b32 %r8, %r9, 3, 31, -1;
    """
    x, trips = np.arange(64) + 1, np.arange(64) % 5
    got, third = run(body, [x, trips], ["%r9", "%r8"], threads=64)
    want = np.where(trips > 0, x * trips + 1000, 0)
    assert got.tolist() == want.tolist()
    assert third.tolist() == want[[3] * 32 + [35] * 32].tolist()


def test_vectors_and_widths_in_memory():
    body = """
    mad.lo.u32 %r9, thread, 16, base;
    st.shared.v2.b64 [%r9], {%d0, %d1};
    bar.sync 0;
    ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r9];
    xor.b32 %r14, thread, 1;
    mad.lo.u32 %r14, %r14, 16, base;
    ld.shared.s16 %r15, [%r14+2];
    ld.shared.u8 %r16, [%r14+9];
    st.shared.b16 [%r9+4], %h0;
    """
    a, b = RANDOM.integers(-(2**63), 2**63 - 1, (2, 32))
    out = run("mov.b16 %h0, 7;" + body, [a, b], [f"%r{i}" for i in (10, 11, 12, 13, 15, 16)])
    a, b = a.view(np.uint64), b.view(np.uint64)
    other = np.arange(32) ^ 1
    want = [(v >> np.uint64(shift) & np.uint64(M - 1)).tolist() for v in (a, b) for shift in (0, 32)]
    assert [o.tolist() for o in out[:4]] == want
    assert out[4].tolist() == [signed(int(v) >> 16 & 0xFFFF, 16) % M for v in a[other]]
    assert out[5].tolist() == [int(v) >> 8 & 255 for v in b[other]]


def test_atomics():
    body = "atom.shared.add.u32 %r9, [base], %r0; bar.sync 0; ld.shared.b32 %r8, [base];"
    before, after = run(body, [np.arange(32)], ["%r9", "%r8"], memory=np.zeros(4, np.uint8))
    assert set(after.tolist()) == {31 * 16}
    assert sorted(before.tolist()) == np.cumsum([0, *range(31)]).tolist()


def test_a_reduction_leaves_the_sum():
    (after,) = run(
        "red.shared.add.u32 [base], %r0; bar.sync 0; ld.shared.b32 %r8, [base];",
        [np.arange(32)],
        ["%r8"],
        memory=np.zeros(4, np.uint8),
    )
    assert set(after.tolist()) == {31 * 16}


def test_warps_that_end_store_nothing():
    (got,) = run("setp.ge.u32 %p1, thread, 32; @%p1 exit; mov.b32 %r9, 7;", [], ["%r9"], threads=64)
    assert got.tolist() == [7] * 32 + [0] * 32


@pytest.mark.parametrize(
    "body",
    [
        "bar.warp.sync -1;",
        "membar.gl;",
        "fence.proxy.async.shared::cta;",
        "griddepcontrol.wait;",
        "prefetch.global.L2 [in];",
        "nanosleep.u32 20;",
        "setmaxnreg.inc.sync.aligned.u32 40;",
        "tcgen05.fence::before_thread_sync;",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    ],
)
def test_what_orders_memory_or_hints_changes_nothing(body):
    a, b = WORDS[:2]
    assert [out.tolist() for out in run(body, [a, b], ["%d0", "%d1"])] == [
        out.tolist() for out in run("", [a, b], ["%d0", "%d1"])
    ]


@pytest.mark.parametrize(("waiting", "taken"), [([], [0]), ([(5, 3, 2), (6, 0, 0)], [1, 5, 3, 2])])
def test_a_cluster_takes_over_the_work_of_one_that_has_not_begun(waiting, taken):
    body = """
    .reg .b128 %q<2>;
    setp.eq.b32 %p1, thread, 0;
    @%p1 mbarrier.init.shared::cta.b64 [base+256], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [base+256], 16;
    @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [base], [base+256];
    again: mbarrier.try_wait.parity.shared.b64 %p4, [base+256], 0;
    @!%p4 bra again;
    ld.shared.b128 %q0, [base];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r5, %r6, %r7}, %q0;
    """
    got = run(body, [], ["%p3", "%r4", "%r5", "%r6"], waiting=waiting)
    assert [set(out.tolist()) for out in got[: len(taken)]] == [{value} for value in taken]


FAULTS = {
    "vadd.s32 %r9, %r0, %r1;": "the instruction 'vadd.s32' is not known",
    "add.sat.s32 %r9, %r0, %r1;": "modifier .sat is not known",
    "add.s32 %d9, %r0, %r1;": "register %d9 has 64 bits, not 32",
    "tcgen05.mma.cta_group::1.kind::i8 [%r0], %d0, %d1, %r1, %p1;": "kind::i8 with 5 operands is not known",
    "ld.shared.b32 %r9, [base+1024];": "0x400 lies outside shared memory",
    "ld.shared.b32 %r9, [base+2];": "are not aligned",
    "mov.b64 %d9, 0x7F0000000000; ld.global.b32 %r9, [%d9];": "belongs to no memory",
    "st.global.b32 [in], %r0;": "read-only",
    "mov.b32 %r9, unknown;": "operand unknown is not a literal",
    "bra nowhere;": "there is no such label",
}


@pytest.mark.parametrize("body", FAULTS)
def test_what_is_wrong_is_said_with_its_line(body):
    with pytest.raises((PtxError, EmulationError), match=rf"line \d+: .*({FAULTS[body]})"):
        run(body, WORDS[:2], ["%r0"])


def test_memory_that_was_not_written_is_nan():
    (got,) = run("ld.shared.b32 %r9, [base+12];", [], ["%r9"])
    assert np.isnan(got.astype(np.uint32).view(np.float32)).all()


def test_the_table_names_each_instruction_once():
    assert len(tables.TABLE) == sum(len(m.TABLE) for m in tables.PARTS)


def test_every_instruction_of_the_table_is_tried():
    folder = Path(__file__).parent
    text = "".join(file.read_text() for file in (folder / "snippet.py", *folder.glob("test_*instructions.py")))
    tried = {name for name in tables.TABLE if re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)}
    assert set(tables.TABLE) - tried == set()
