"""Matrix and asynchronous instructions, in hand-written PTX, against the PTX manual's figures and formulas."""

import ml_dtypes
import numpy as np
import pytest

from ptx.machine import Order
from ptx.memory import Bytes, DeadlockError, EmulationError, TensorMap
from ptx.snippet import run

RANDOM = np.random.default_rng(0)
BF = ml_dtypes.bfloat16
ORDERS = [Order(), Order(early=frozenset({"copy", "store", "mma", "transfer"})), Order(seed=1), Order(seed=2)]
EVERY_ORDER = pytest.mark.parametrize("order", ORDERS, ids=["late", "early", "seed 1", "seed 2"])


def random(*shape):
    return RANDOM.normal(size=shape).astype(BF)


def words(low, high):
    """Pairs of bfloat16 as 32-bit words, the first in the low half."""
    return low.view(np.uint16).astype(np.uint64) | high.view(np.uint16).astype(np.uint64) << np.uint64(16)


def floats(register):
    return register.astype(np.uint32).view(np.float32)


def names(first, count):
    return [f"%r{first + i}" for i in range(count)]


def braces(registers):
    return "{" + ", ".join(registers) + "}"


def test_mma_sync():
    a, b, c = random(16, 16), random(16, 8), RANDOM.normal(size=(16, 8)).astype(np.float32)
    inputs = np.zeros((10, 32), np.uint64)
    for lane in range(32):
        group, t = divmod(lane, 4)
        at = lambda i, g=group, t=t: (g + 8 * (i // 2 % 2), 2 * t + i % 2 + 8 * (i // 4))  # noqa: E731 - of a_i
        bt = lambda i, g=group, t=t: (2 * t + i % 2 + 8 * (i // 2), g)  # noqa: E731 - of b_i
        ct = lambda i, g=group, t=t: (g + 8 * (i // 2), 2 * t + i % 2)  # noqa: E731 - of c_i
        inputs[:4, lane] = [words(a[at(2 * r)], a[at(2 * r + 1)]) for r in range(4)]
        inputs[4:6, lane] = [words(b[bt(2 * r)], b[bt(2 * r + 1)]) for r in range(2)]
        inputs[6:, lane] = [c[ct(i)].view(np.uint32) for i in range(4)]
    d = names(20, 4)
    regs = [braces(d), braces(names(0, 4)), braces(names(4, 2)), braces(names(6, 4))]
    got = run(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {', '.join(regs)};", inputs, d)
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    for i in range(4):
        lanes = np.arange(32)
        np.testing.assert_allclose(floats(got[i]), want[lanes // 4 + 8 * (i // 2), 2 * (lanes % 4) + i % 2], rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(transposed):
    matrices = RANDOM.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    rows = RANDOM.permutation(32) * 16  # where each of the 32 rows lies
    memory = np.zeros(512, np.uint8)
    for row, at in enumerate(rows):
        memory[at : at + 16] = matrices[row // 8, row % 8].view(np.uint8)
    trans = ".trans" if transposed else ""
    regs = braces(names(20, 4))
    body = f"""
    add.u32 %r1, %r0, base;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {regs}, [%r1];
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1+512], {regs};
    bar.sync 0;
    ld.shared.v2.b32 {{%r30, %r31}}, [%r1+512];
    ld.shared.v2.b32 {{%r32, %r33}}, [%r1+520];
    """
    got = run(body, [rows], [*names(20, 4), *names(30, 4)], memory=memory)
    for i in range(4):
        m = matrices[i].T if transposed else matrices[i]
        want = [int(m[t // 4, 2 * (t % 4)]) | int(m[t // 4, 2 * (t % 4) + 1]) << 16 for t in range(32)]
        assert got[i].tolist() == want
        back = [int(matrices[t // 8, t % 8, 2 * i]) | int(matrices[t // 8, t % 8, 2 * i + 1]) << 16 for t in range(32)]
        assert got[4 + i].tolist() == back


def k_major(matrix, swizzle):
    """[rows, k] as the manual's figures lay it: atoms of 8 rows, chunks of 16 bytes exchanged by the row."""
    rows, k = matrix.shape
    width = swizzle // 2
    memory = np.zeros(rows * k, BF)
    for r in range(rows):
        for c in range(0, k, 8):
            atom = c // width * rows // 8 + r // 8
            chunk = c % width // 8
            mixed = chunk ^ {128: r % 8, 64: r // 2 % 4, 32: r // 4 % 2}[swizzle]
            memory[atom * 4 * swizzle + r % 8 * width + 8 * mixed :][:8] = matrix[r, c : c + 8]
    return memory


def descriptor(start, stride, leading=0, tag=0, bit=62):
    """Start, leading and stride byte offsets in units of 16 bytes, and the swizzle's number."""
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | tag << bit


def signed64(x):
    return x - 2**64 if x >> 63 else x


@EVERY_ORDER
@pytest.mark.parametrize(("swizzle", "tag"), [(128, 1), (64, 2), (32, 3)])
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma(order, swizzle, tag, a_in_registers):
    n, k = 32, swizzle // 2
    a, b = random(64, k), random(n, k)
    memory = np.concatenate([k_major(a, swizzle), k_major(b, swizzle)]).view(np.uint8)
    d, steps, inputs = names(40, n // 2), k // 16, []
    body = "".join(f"mov.b32 {r}, 0f3F800000;\n" for r in d) + "wgmma.fence.sync.aligned;\n"
    for step in range(steps):
        of_a, of_b = (signed64(descriptor(s + 32 * step, 8 * swizzle, 0, tag)) for s in (0, 2 * a.size))
        if a_in_registers:
            t = np.arange(128)
            row, column = 16 * (t // 32) + t % 32 // 4, 16 * step + 2 * (t % 4)
            for i in range(4):
                at = row + 8 * (i % 2), column + 8 * (i // 2)
                inputs.append(words(a[at], a[at[0], at[1] + 1]).view(np.int64))
            left, flags = braces(names(4 * step, 4)), "1, 1, 0"
        else:
            body += f"mov.b64 %d90, {of_a};\n"
            left, flags = "%d90", "1, 1, 0, 0"
        body += f"mov.b64 %d91, {of_b}; setp.ne.b32 %p1, {step}, 0;\n"
        body += f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {braces(d)}, {left}, %d91, %p1, {flags};\n"
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    got = run(body, inputs, d, threads=128, shared=memory.size, memory=memory, order=order)
    want, t = a.astype(np.float64) @ b.astype(np.float64).T, np.arange(128)
    for i, register in enumerate(got):
        rows, columns = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
        np.testing.assert_allclose(floats(register), want[rows, columns], rtol=1e-4, atol=1e-4)


def test_a_product_that_is_not_waited_for_is_not_there():
    memory = np.ones(2048, BF).view(np.uint8)
    d = names(40, 4)
    body = (
        "".join(f"mov.b32 {r}, 0f00000000;\n" for r in d)
        + f"""
    mov.b64 %d90, {descriptor(0, 128)}; setp.eq.b32 %p1, 0, 0;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {braces(d)}, %d90, %d90, %p1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    mov.b32 %r50, %r40;
    wgmma.wait_group.sync.aligned 0;
    """
    )
    before, after = run(body, [], ["%r50", "%r40"], threads=128, shared=4096, memory=memory)
    assert floats(before).tolist() == [0] * 128
    assert floats(after).tolist() == [16] * 128


@EVERY_ORDER
@pytest.mark.parametrize(("m", "lane"), [(128, 0), (64, 0), (64, 16)])
def test_tcgen05(order, m, lane):
    n, k = 32, 64
    a, b = random(m, k), random(n, k)
    memory = np.concatenate([k_major(a, 128), k_major(b, 128), np.zeros(64, BF)]).view(np.uint8)
    slot = 2 * (a.size + b.size)
    form = 1 << 4 | 1 << 7 | 1 << 10 | n // 8 << 17 | m // 16 << 24
    body = f"""
    setp.eq.b32 %p1, thread, 0;
    setp.lt.u32 %p2, thread, 32;
    @%p1 mbarrier.init.shared::cta.b64 [base+{slot + 8}], 1;
    @!%p2 bra ready;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [base+{slot}], 64;
    ready: bar.sync 0;
    ld.shared.b32 %r1, [base+{slot}];
    add.u32 %r2, %r1, {lane << 16};
    @!%p1 bra wait;
    """
    for step in range(k // 16):
        of_a, of_b = (signed64(descriptor(s + 32 * step, 1024, 0, 2, 61)) for s in (0, 2 * a.size))
        body += f"mov.b64 %d1, {of_a}; mov.b64 %d2, {of_b}; setp.ne.b32 %p3, {step}, 0; mov.b32 %r3, {form};\n"
        body += "tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r3, %p3;\n"
    half, whole = braces(names(20, 16)), braces(names(40, 32))
    body += f"""
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [base+{slot + 8}];
    wait: mbarrier.try_wait.parity.shared.b64 %p4, [base+{slot + 8}], 0, 10000000;
    @!%p4 bra wait;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.16x256b.x4.b32 {half}, [%r2];
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {whole}, [%r1];
    tcgen05.wait::ld.sync.aligned;
    bar.sync 0;
    @%p2 bra free;
    bra.uni end;
    free: tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;
    end:
    """
    got = run(body, [], names(20, 16) + names(40, 32), threads=128, shared=memory.size, memory=memory, order=order)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    t = np.arange(128)
    warp, in_warp = t // 32, t % 32
    for i in range(16):
        row = in_warp // 4 + 8 * (i // 2 % 2)  # of the 16 lanes that the load begins at
        row, column = row + (16 if m == 64 else 32) * warp, 8 * (i // 4) + 2 * (in_warp % 4) + i % 2
        np.testing.assert_allclose(floats(got[i]), want[row, column], rtol=1e-4, atol=1e-4)
    for i in range(32):
        there = in_warp // 16 == lane // 16 if m == 64 else in_warp >= 0
        row = (16 * warp + in_warp % 16 if m == 64 else t)[there]
        np.testing.assert_allclose(floats(got[16 + i])[there], want[row, i], rtol=1e-4, atol=1e-4)
        assert np.isnan(floats(got[16 + i])[~there]).all()


@EVERY_ORDER
def test_tensor_memory_is_written_and_read_in_other_shapes(order):
    stored = RANDOM.integers(0, 2**31, (8, 128)).astype(np.uint64)
    body = f"""
    setp.lt.u32 %p2, thread, 32;
    @!%p2 bra ready;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [base], 32;
    ready: bar.sync 0;
    ld.shared.b32 %r90, [base];
    tcgen05.st.sync.aligned.16x128b.x4.b32 [%r90], {braces(names(0, 8))};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {braces(names(20, 16))}, [%r90];
    tcgen05.wait::ld.sync.aligned;
    bar.sync 0;
    @!%p2 bra end;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r90, 32;
    end:
    """
    got = np.array(run(body, stored, names(20, 16), threads=128, order=order))
    for i in range(8):
        for t in range(128):
            lane = 32 * (t // 32) + t % 32 // 4 + 8 * (i % 2)
            assert got[4 * (i // 2) + t % 4, lane] == stored[i, t]


@EVERY_ORDER
@pytest.mark.parametrize("swizzle", [16, 32, 64, 128])
def test_bulk_copies(order, swizzle):
    """A box across the edge of a tensor is filled with zeros, permuted by the swizzle, and goes back without them."""
    width = swizzle // 2
    data = RANDOM.integers(0, 2**15, (20, 3 * width)).astype(np.uint16)
    box = (8, width)
    tensor = TensorMap(Bytes(data.reshape(-1).view(np.uint8), "tensor"), 0, 2, data.shape, (6 * width, 2), box, swizzle)
    size = 16 * width
    body = f"""
    setp.eq.b32 %p1, thread, 0;
    @%p1 mbarrier.init.shared::cta.b64 [base+{size}], 1;
    bar.sync 0;
    mov.b32 %r5, {width}; mov.b32 %r6, 16;
    @%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [base+{size}], {size};
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [base], [map_address, {{%r5, %r6}}],
        [base+{size}];
    again: mbarrier.try_wait.parity.shared.b64 %p4, [base+{size}], 0;
    @!%p4 bra again;
    """
    rows = size // 4 // 32
    body += "".join(
        f"mad.lo.u32 %r9, thread, 4, base; ld.shared.b32 %r{20 + i}, [%r9+{128 * i}];\n" for i in range(rows)
    )
    body += """
    mov.b32 %r6, 18; mov.b32 %r5, 0;
    fence.proxy.async.shared::cta;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [map_address, {%r5, %r6}], [base];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    """
    if rows == 0:
        pytest.skip("less than a word a thread")
    got = run(body, [], names(20, rows), shared=2048, tensor=tensor, order=order)
    memory = np.array(got, np.uint64).astype(np.uint32).reshape(-1).view(np.uint16)
    want = np.zeros(box, np.uint16)
    want[:4] = data[16:20, width : 2 * width]
    for r in range(8):
        for chunk in range(width // 8):
            mixed = chunk ^ {128: r % 8, 64: r // 2 % 4, 32: r // 4 % 2, 16: 0}[swizzle]
            assert memory[r * width + 8 * mixed :][:8].tolist() == want[r, 8 * chunk : 8 * chunk + 8].tolist()
    after = tensor.buffer.views[2][: data.size].reshape(data.shape)
    assert (after[18:20, :width] == want[:2]).all()
    assert (after[:18] == data[:18]).all()


@EVERY_ORDER
def test_clusters(order):
    """A box to both CTAs, an arrival on the other's barrier, and a meeting of all threads."""
    data = np.arange(64, dtype=np.uint16).reshape(8, 8)
    tensor = TensorMap(Bytes(data.reshape(-1).view(np.uint8), "tensor"), 0, 2, (8, 8), (16, 2), (8, 8), 16)
    body = """
    mov.u32 %r1, %cluster_ctaid.x;
    setp.eq.b32 %p1, thread, 0;
    @%p1 mbarrier.init.shared::cta.b64 [base+256], 2;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    xor.b32 %r2, %r1, 1;
    @%p1 mapa.shared::cluster.u32 %r3, base, %r2;
    @%p1 mbarrier.arrive.shared::cluster.b64 _, [%r3+256];
    @%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [base+256], 128;
    setp.eq.and.b32 %p2, %r1, 0, %p1;
    mov.b32 %r5, 0; mov.b16 %h1, 3;
    @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [base],
        [map_address, {%r5, %r5}], [base+256], %h1;
    again: mbarrier.try_wait.parity.shared.b64 %p4, [base+256], 0;
    @!%p4 bra again;
    mad.lo.u32 %r9, thread, 4, base;
    ld.shared.b32 %r8, [%r9];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    got, rank = run(body, [], ["%r8", "%r1"], cluster=2, tensor=tensor, order=order)
    assert rank.tolist() == [0] * 32 + [1] * 32
    assert got.tolist() == data.reshape(-1).view(np.uint32).tolist() * 2


START = "setp.eq.b32 %p1, thread, 0; @%p1 mbarrier.init.shared::cta.b64 [base+512], 32; bar.sync 0;"
WAIT = "again: mbarrier.try_wait.parity.shared.b64 %p4, [base+512], PARITY; @!%p4 bra again;"
ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64 _, [base+512];"
WRONG = {
    "a barrier that nobody arrives at": (START + WAIT.replace("PARITY", "0"), DeadlockError, "parity 0 of the barrier"),
    "the wrong phase": (START + ARRIVE + WAIT.replace("PARITY", "1"), DeadlockError, "parity 1 of the .* in phase 1"),
    "an arrival too many": (START + "@%p1 " + ARRIVE + ARRIVE, EmulationError, "more than are pending"),
    "an arrival too few": (START + "@!%p1 " + ARRIVE, EmulationError, "at the end, barrier in phase 0 with 1 of 32"),
    "bytes that never come": (
        START + "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [base+512], 16;" + ARRIVE,
        EmulationError,
        "16 bytes pending",
    ),
    "no barrier there": (ARRIVE, EmulationError, "there is no mbarrier"),
    "threads missing at a barrier": ("bar.sync 1, 64;", DeadlockError, "32 of 64 threads"),
    "tensor memory that is not allocated": (
        "mov.b32 %r1, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];", EmulationError, "are allocated",
    ),
    "tensor memory that is not freed": (
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [base], 64;", EmulationError, "still allocated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_waits_or_counts_wrongly_is_seen(fault):
    body, kind, message = WRONG[fault]
    with pytest.raises(kind, match=message):
        run(body, [], ["%r0"])
