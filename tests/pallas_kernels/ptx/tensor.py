"""Blackwell's tensor memory and tensor core: tcgen05.

An address of tensor memory is lane << 16 | column, of 128 lanes by 512 columns of 32 bits. Products and commits of a
CTA happen in the order of their issue, at any time; stores of a warp when it waits for them, or before. Loads happen at
once: LLVM moves loaded registers before the wait for them, which ptxas allows by tracking the registers.
"""

import functools
from typing import Any

import numpy as np

from ptx.arithmetic import halves
from ptx.copies import issuers
from ptx.decode import KINDS, Decoder, Run, addresses, items
from ptx.flow import nothing
from ptx.matrix import K, shared_operand
from ptx.memory import RANK_SHIFT, EmulationError
from ptx.parser import Address, Instruction, PtxError

PRED, U32, U64, U16 = (KINDS[k] for k in ("pred", "u32", "u64", "u16"))
SWIZZLES = {0: 16, 2: 128, 4: 64, 6: 32}


def _group(rest: tuple[str, ...]) -> int:
    if rest[0] not in ("cta_group::1", "cta_group::2"):
        raise PtxError(f"form {'.'.join(rest)} is not known")
    return int(rest[0][-1])


def columns_of(cta: Any, first: int, count: int) -> slice:
    """Columns of tensor memory, which must be allocated.

    Raises:
        EmulationError: some are not.
    """
    if not any(base <= first and first + count <= base + size for base, size in cta.tensor_columns.items()):
        raise EmulationError(f"tensor memory columns {first}..{first + count - 1}: {cta.tensor_columns} are allocated")
    return slice(first, first + count)


def alloc(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`tcgen05.alloc`: the first free columns, their address written to shared memory. It never waits for columns."""
    _group(rest)
    address, count = decoder.address(instruction.operands[0]), decoder.read(instruction.operands[1], U32)

    def run(t: Any, where: Any) -> None:
        if t.warps != 1:
            raise EmulationError(f"{t.warps} warps allocate tensor memory at once")
        number = int(t[U32][count][0])
        if number not in (32, 64, 128, 256, 512):
            raise EmulationError(f"{number} columns cannot be allocated: 32 to 512, a power of two")
        used = t.cta.tensor_columns
        starts = [0, *(base + size for base, size in used.items())]
        free = [s for s in starts if s + number <= 512 and all(s + number <= b or b + n <= s for b, n in used.items())]
        if not free:
            raise EmulationError(f"{number} columns of tensor memory are not free: {used} are allocated")
        used[min(free)] = number
        block, base = t.cta.memory.find(int(addresses(t, address)[0]))
        block.views[4][(int(addresses(t, address)[0]) - base) >> 2] = min(free)

    return run


def dealloc(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`tcgen05.dealloc`."""
    _group(rest)
    address, count = (decoder.read(o, U32) for o in instruction.operands)

    def run(t: Any, where: Any) -> None:
        first, number = int(t[U32][address][0]), int(t[U32][count][0])
        if t.warps != 1 or t.cta.tensor_columns.pop(first, None) != number:
            raise EmulationError(f"columns {first} and {number - 1} after it are freed, but were not allocated so")

    return run


def _places(shape: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Lane and column of each [thread, register] of a warp's load or store, as the manual's figures have them."""
    t = np.arange(32)[:, None]
    if shape == "32x32b":
        i = np.arange(number)
        return np.broadcast_to(t, (32, number)), np.broadcast_to(i, (32, number))
    if shape == "16x128b":
        i = np.arange(2 * number)
        return t // 4 + 8 * (i % 2), 4 * (i // 2) + t % 4
    if shape == "16x256b":
        i = np.arange(4 * number)
        return t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
    raise PtxError(f"shape .{shape} is not known")


def transfer(loads: bool) -> Any:
    """`tcgen05.ld` and `tcgen05.st`: each warp between its registers and its 32 lanes, the quarter of its number."""

    def entry(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
        if rest[:2] != ("sync", "aligned") or rest[4:] != ("b32",):
            raise PtxError(f"form {'.'.join(rest)} is not known")
        registers, place = instruction.operands if loads else instruction.operands[::-1]
        lanes, columns = _places(rest[2], int(rest[3][1:]))
        rows = [(decoder.write if loads else decoder.read)(o, U32) for o in items(registers)]
        if len(rows) != lanes.shape[1]:
            raise PtxError(f"{len(rows)} registers for shape .{rest[2]}.{rest[3]}")
        address = decoder.address(place)
        width = int(columns.max()) + 1

        def run(t: Any, where: Any) -> None:
            if where is not True:
                raise EmulationError("tensor memory is accessed by all threads of a warp")
            at = addresses(t, address)[::32].tolist()
            for warp, base in enumerate(at):
                number = (t.low // 32 + warp) % 4
                lane, column = (base >> 16) & 0xFFFF, base & 0xFFFF
                if lane // 32 not in (0, number) or lane % 32 + int(lanes.max()) > 31:
                    raise EmulationError(f"warp {number} of its warpgroup accesses lane {lane} of tensor memory")
                columns_of(t.cta, column, width)
                index = (32 * number + lane % 32 + lanes, column + columns)
                frame = t.cta.frame(t.low + 32 * warp, t.low + 32 * warp + 32)
                if loads:
                    for row, values in zip(rows, t.cta.tensor_memory[index].T, strict=True):
                        frame[U32][row][...] = values
                    continue
                work = functools.partial(_store, frame, rows, index)
                queue = t.cta.tensor_stores.setdefault(t.low // 32 + warp, [])
                if not queue and t.cta.cluster.now("transfer"):
                    work()
                else:
                    queue.append(work)

        return run

    return entry


def _store(frame: Any, rows: list[int], index: Any) -> None:
    frame.cta.tensor_memory[index] = np.stack([frame[U32][row] for row in rows], 1)


def wait_stores(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`tcgen05.wait::st`: the warp's stores are done."""

    def run(t: Any, where: Any) -> None:
        for warp in range(t.low // 32, t.high // 32):
            for work in t.cta.tensor_stores.pop(warp, []):
                work()

    return run


def mma(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`tcgen05.mma.kind::f16` of bfloat16, float32 sums, issued by one thread.

    Row r of 128 lies in lane r. Of 64, in lane 32 (r / 16) + r mod 16, moved by the address's lane (0 or 16). A left
    operand in tensor memory has two values of k in each 32-bit column. With `.cta_group::2` the rows of d and a, and
    the columns of b, are halved between the pair of CTAs.
    """
    pair = _group(rest) == 2
    if rest[1:] != ("kind::f16",) or len(instruction.operands) != 5:
        raise PtxError(f"form {'.'.join(rest)} with {len(instruction.operands)} operands is not known")
    d, a, b, idesc, enable = instruction.operands
    sums, in_tensor_memory = decoder.address(d), isinstance(a, Address)
    left = decoder.address(a) if in_tensor_memory else (U64, decoder.read(a, U64), np.uint64(0))
    right, form, accumulate = decoder.read(b, U64), decoder.read(idesc, U32), decoder.read(enable, PRED)

    def run(t: Any, where: Any) -> None:
        for thread in issuers(t, where):
            issue(t, thread)

    def issue(t: Any, thread: int) -> None:
        arguments = (
            int(addresses(t, sums)[thread]),
            int(addresses(t, left)[thread]),
            int(t[U64][right][thread]),
            int(t[U32][form][thread]),
            bool(t[PRED][accumulate][thread]),
        )
        ctas = t.cta.cluster.ctas if pair else [t.cta]
        if pair and len(ctas) != 2:
            raise EmulationError(f"a product of a pair of CTAs in a cluster of {len(ctas)}")
        work = functools.partial(_product, ctas, in_tensor_memory, *arguments)
        t.cta.cluster.later("mma", work, ("tensor", ctas[0].rank))

    return run


def _product(ctas: Any, in_tensor_memory: bool, d: int, a: int, b: int, form: int, accumulate: bool) -> None:
    m, n = (form >> 24 & 31) * 16 // len(ctas), (form >> 17 & 63) * 8
    if form & 0x600F or form >> 4 & 3 != 1 or form >> 7 & 7 != 1 or form >> 10 & 7 != 1:
        raise EmulationError(f"instruction descriptor {form:#x}: only dense bfloat16 with float32 sums is known")
    if m not in (64, 128) or (len(ctas) == 2 and m != 128) or n % (8 if m == 64 else 16) or not 0 < n <= 256:
        raise EmulationError(f"instruction descriptor {form:#x} asks for {m} rows in a CTA and {n} columns")
    column, lane = d & 0xFFFF, d >> 16
    if lane not in ((0, 16) if m == 64 else (0,)):
        raise EmulationError(f"sums of {m} rows begin at lane {lane}")
    r = np.arange(m)
    lanes = 32 * (r // 16) + r % 16 + lane if m == 64 else r
    share = n // len(ctas)
    bm = np.concatenate([_from_shared(cta, b, share, bool(form >> 16 & 1)) for cta in ctas])
    for cta in ctas:
        if in_tensor_memory:
            words = cta.tensor_memory[lanes, columns_of(cta, a & 0xFFFF, K // 2)]
            am = np.stack(halves(words), -1).reshape(m, K)
        else:
            am = _from_shared(cta, a, m, bool(form >> 15 & 1))
        product = am @ bm.T
        where = (lanes, columns_of(cta, column, n))
        if accumulate:
            product += cta.tensor_memory[where].view(np.float32)
        cta.tensor_memory[where] = product.view(np.uint32)


def _from_shared(cta: Any, descriptor: int, rows: int, transposed: bool) -> np.ndarray:
    swizzle = SWIZZLES.get(descriptor >> 61)
    if swizzle is None or descriptor >> 49 & 0xF:
        raise EmulationError(f"matrix descriptor {descriptor:#x} has an unknown swizzle, base offset or stride mode")
    return shared_operand(cta, descriptor, swizzle, rows, transposed)


def commit(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`tcgen05.commit`: one arrival on a barrier when all products before it are done."""
    pair = _group(rest) == 2
    known = {"mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64", "cta_group::1", "cta_group::2"}
    unknown = [r for r in rest if r not in known]
    if unknown:
        raise PtxError(f"modifier .{unknown[0]} is not known")
    address = decoder.address(instruction.operands[0])
    multicast = decoder.read(instruction.operands[1], U16) if "multicast::cluster" in rest else None

    def run(t: Any, where: Any) -> None:
        for thread in issuers(t, where):
            issue(t, thread)

    def issue(t: Any, thread: int) -> None:
        at = int(addresses(t, address)[thread])
        targets = [at]
        if multicast is not None:
            mask, low = int(t[U16][multicast][thread]), at & ((1 << RANK_SHIFT) - 1)
            targets = [r << RANK_SHIFT | low for r in range(16) if mask >> r & 1]
        found = [t.cta.barrier(target) for target in targets]

        def arrive() -> None:
            for barrier in found:
                barrier.arrive(1)

        t.cta.cluster.later("mma", arrive, ("tensor", 0 if pair else t.cta.rank))

    return run


TABLE = {
    "tcgen05.alloc": (alloc, False),
    "tcgen05.dealloc": (dealloc, False),
    "tcgen05.ld": (transfer(True), False),
    "tcgen05.st": (transfer(False), False),
    "tcgen05.wait::ld": (nothing, False),
    "tcgen05.wait::st": (wait_stores, False),
    "tcgen05.mma": (mma, False),
    "tcgen05.commit": (commit, False),
}
