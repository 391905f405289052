"""Matrix products of a warp (mma.sync) and of a warpgroup (wgmma), and operands that descriptors name."""

import functools
from typing import Any

import numpy as np

from ptx.arithmetic import from_bfloat16, halves
from ptx.decode import KINDS, Decoder, Run, immediate, items
from ptx.memory import EmulationError, swizzled
from ptx.parser import Instruction, PtxError, Vector

PRED, U32, F32, U64 = (KINDS[k] for k in ("pred", "u32", "f32", "u64"))
WARPGROUP = 128
K = 16
"""Values of a product along k, for operands of 16 bits."""


@functools.lru_cache(4096)
def operand_index(start: int, leading: int, stride: int, swizzle: int, rows: int, transposed: bool) -> np.ndarray:
    """Numbers of 16-bit elements [rows, 16] in shared memory, of an operand in the canonical layouts of the manual.

    `start`, `leading` and `stride` are the descriptor's byte addresses. Rows run along m or n, columns along k;
    `transposed` means that neighbours along m or n are neighbours in memory (MN-major).
    """
    r, k = np.arange(rows)[:, None], np.arange(K)[None, :]
    if swizzle == 16:  # core matrices of 8 rows of 16 bytes, unswizzled
        if transposed:
            raise PtxError("an MN-major operand without swizzle is not known")
        at = start + r // 8 * stride + k // 8 * leading + r % 8 * 16 + k % 8 * 2
    elif transposed:  # atoms of 8 values of k by `swizzle` bytes of rows
        wide = swizzle // 2
        at = start + r // wide * leading + k // 8 * stride + k % 8 * swizzle + r % wide * 2
    else:  # atoms of 8 rows by `swizzle` bytes of k
        at = start + r // 8 * stride + r % 8 * swizzle + k * 2
    return swizzled(at, swizzle) >> 1


def fields(descriptor: int) -> tuple[int, int, int]:
    """Start, leading and stride byte offsets: 14-bit fields in units of 16 bytes, at bits 0, 16 and 32."""
    return tuple((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))  # pyright: ignore[reportReturnType]


def shared_operand(cta: Any, descriptor: int, swizzle: int, rows: int, transposed: bool) -> np.ndarray:
    """The float32 values [rows, 16] of a bfloat16 operand in shared memory."""
    index = operand_index(*fields(descriptor), swizzle, rows, transposed)
    view = cta.shared.views[2]
    if int(index.max()) >= view.size:
        raise EmulationError(f"the operand of descriptor {descriptor:#x} reaches past the end of shared memory")
    return from_bfloat16(view[index])


def mma_sync(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mma.sync.m16n8k16` of bfloat16, float32 sums. In lane 4 g + c, register by register (low, high half):

    a: rows g, g + 8 at k 2 c + (0, 1), then the same at k + 8; b: column g at k 2 c + (0, 1), then k + 8;
    c and d: row g at columns 2 c, 2 c + 1, then row g + 8.
    """
    if rest != ("aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"):
        raise PtxError(f"form {'.'.join(rest)} is not known")
    d, a, b, c = (items(o) for o in instruction.operands)
    if (len(d), len(a), len(b), len(c)) != (4, 4, 2, 4):
        raise PtxError("the fragments have 4, 4, 2 and 4 registers")
    out = [decoder.write(o, F32) for o in d]
    left, right = [decoder.read(o, U32) for o in a], [decoder.read(o, U32) for o in b]
    start = [decoder.read(o, F32) for o in c]

    def run(t: Any, where: Any) -> None:
        if where is not True:
            raise EmulationError("mma takes all threads of a warp")
        w = t.warps
        words = np.stack([t[U32][r] for r in left + right])
        values = np.empty((6, w, 8, 4, 2), np.float32)
        low, high = halves(words)
        values[..., 0], values[..., 1] = low.reshape(6, w, 8, 4), high.reshape(6, w, 8, 4)
        # a: register = row half + 2 k half. To [warp, row half, g, k half, c, e].
        am = values[:4].reshape(2, 2, w, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(w, 16, 16)
        bm = values[4:].transpose(1, 0, 3, 4, 2).reshape(w, 16, 8)  # [warp, k half, c, e, g]
        cm = np.stack([t[F32][r] for r in start]).reshape(2, 2, w, 8, 4).transpose(2, 0, 3, 4, 1).reshape(w, 16, 8)
        result = (np.matmul(am, bm) + cm).reshape(w, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for row, values_of in zip(out, result, strict=True):
            t[F32][row][...] = values_of

    return run


def wgmma(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`wgmma.mma_async` m64nNk16 of bfloat16, float32 sums; the left operand in registers or shared memory.

    The product happens when it is waited for, or before; until then its sums are what they were.
    """
    shape, types = rest[2], rest[3:]
    if rest[:2] != ("sync", "aligned") or types != ("f32", "bf16", "bf16") or not shape.startswith("m64n"):
        raise PtxError(f"form {'.'.join(rest)} is not known")
    n = int(shape[4 : shape.index("k")])
    d, a, b, scale_d, *flags = instruction.operands
    out = [decoder.write(o, F32) for o in items(d)]
    in_registers = isinstance(a, Vector)
    left = [decoder.read(o, U32) for o in items(a)] if in_registers else [decoder.read(a, U64)]
    right, accumulate = decoder.read(b, U64), decoder.read(scale_d, PRED)
    signs, majors = [immediate(f) for f in flags[:2]], [immediate(f) for f in flags[2:]]
    if len(out) != n // 2 or signs != [1, 1] or len(majors) != (1 if in_registers else 2):
        raise PtxError(f"{len(out)} sums for n {n}, signs {signs}, {len(majors)} major flags")
    transposed_b = bool(majors[-1])

    def run(t: Any, where: Any) -> None:
        if where is not True or t.low % WARPGROUP or t.size % WARPGROUP:
            raise EmulationError("wgmma takes all threads of a warpgroup")
        for first in range(0, t.size, WARPGROUP):
            frame = t.cta.frame(t.low + first, t.low + first + WARPGROUP)
            descriptors = [int(frame[U64][r][0]) for r in ([right] if in_registers else [*left, right])]
            adds = bool(frame[PRED][accumulate][0])
            # An immediate or a predicate may be overwritten before the product happens; registers may not.
            work = functools.partial(_multiply, frame, descriptors, adds)
            groups = t.cta.warpgroup_products.setdefault((t.low + first) // WARPGROUP, [[]])
            if not any(groups) and t.cta.cluster.now("mma"):
                work()
            else:
                groups[-1].append(work)

    def _multiply(frame: Any, descriptors: list[int], adds: bool) -> None:
        b_swizzle = _wgmma_swizzle(descriptors[-1])
        bm = shared_operand(frame.cta, descriptors[-1], b_swizzle, n, transposed_b)
        if in_registers:
            values = np.empty((4, 4, 8, 4, 2), np.float32)  # register (k half, row half), warp, g, c, e
            low, high = halves(np.stack([frame[U32][r] for r in left]))
            values[..., 0], values[..., 1] = low.reshape(4, 4, 8, 4), high.reshape(4, 4, 8, 4)
            am = values.reshape(2, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, 16)
        else:
            am = shared_operand(frame.cta, descriptors[0], _wgmma_swizzle(descriptors[0]), 64, bool(majors[0]))
        product = am @ bm.T  # rows 16 warp + 8 half + g; columns 8 block + 2 c + e
        registers = product.reshape(4, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, WARPGROUP)
        for row, values_of in zip(out, registers, strict=True):
            if adds:
                frame[F32][row] += values_of
            else:
                frame[F32][row][...] = values_of

    return run


def _wgmma_swizzle(descriptor: int) -> int:
    return (16, 128, 64, 32)[descriptor >> 62]


def wgmma_commit(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`wgmma.commit_group`."""

    def run(t: Any, where: Any) -> None:
        for warpgroup in range(t.low // WARPGROUP, -(-t.high // WARPGROUP)):
            t.cta.warpgroup_products.setdefault(warpgroup, [[]]).append([])

    return run


def wgmma_wait(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`wgmma.wait_group`: all but the last groups of the warpgroup are done."""
    most = immediate(instruction.operands[0])

    def run(t: Any, where: Any) -> None:
        for warpgroup in range(t.low // WARPGROUP, -(-t.high // WARPGROUP)):
            *closed, opened = t.cta.warpgroup_products.setdefault(warpgroup, [[]])
            done, kept = (closed[:-most], closed[-most:]) if most else (closed, [])
            for work in (w for group in done for w in group):
                work()
            t.cta.warpgroup_products[warpgroup] = [*kept, opened]

    return run


TABLE = {
    "mma.sync": (mma_sync, False),
    "wgmma.mma_async": (wgmma, False),
    "wgmma.commit_group": (wgmma_commit, False),
    "wgmma.wait_group": (wgmma_wait, False),
}
