"""Bulk copies of the copy engine (TMA), and the mbarriers that count threads and bytes."""

from typing import Any

import numpy as np

from ptx.decode import KINDS, Decoder, Run, addresses, immediate
from ptx.memory import DESCRIPTOR_BYTES, RANK_SHIFT, Barrier, EmulationError, TensorMap, swizzled
from ptx.parser import Address, Instruction, PtxError

U32, U64, S32 = KINDS["u32"], KINDS["u64"], KINDS["s32"]
LOW = (1 << RANK_SHIFT) - 1
SWIZZLE_ALIGNMENT = {16: 128, 32: 128, 64: 128, 128: 128}


def threads_of(t: Any, where: Any) -> np.ndarray:
    """Numbers of the threads that execute, within the frame."""
    return np.arange(t.size) if where is True else np.nonzero(where)[0]


def tensor_copy(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`cp.async.bulk.tensor`: a box between global and shared memory, in tile mode."""
    rank, *modifiers = rest
    groups = {"cta_group::1", "cta_group::2"}
    loads = {"global", "mbarrier::complete_tx::bytes", "multicast::cluster", "tile", "L2::cache_hint", *groups}
    if modifiers[0] in ("shared::cta", "shared::cluster"):
        unknown = [m for m in modifiers[1:] if m not in loads]
        if unknown:
            raise PtxError(f"modifier .{unknown[0]} is not known")
        return _load(decoder, instruction, int(rank[0]), modifiers)
    if modifiers[0] == "global" and modifiers[1] == "shared::cta" and modifiers[-1] == "bulk_group":
        return _store(decoder, instruction, int(rank[0]))
    raise PtxError(f"form {'.'.join(rest)} is not known")


def _tensor(decoder: Decoder, operand: Any, rank: int) -> tuple[tuple[int, int, np.uint64], list[int]]:
    """The address of a tensor map and the rows of the coordinates."""
    if not isinstance(operand, Address) or operand.coordinates is None or len(operand.coordinates.items) != rank:
        raise PtxError(f"operand {operand} is not a tensor map with {rank} coordinates")
    base = decoder.address(Address(operand.base, operand.offset))
    return base, [decoder.read(c, S32) for c in operand.coordinates.items]


def _map_at(t: Any, address: int) -> TensorMap:
    found = t.cta.cluster.launch.tensor_maps.get(address)
    if found is None:
        raise EmulationError(f"there is no tensor map at {address:#x} (maps lie {DESCRIPTOR_BYTES} bytes apart)")
    return found


def issuers(t: Any, where: Any) -> list[int]:
    """The threads that issue an asynchronous operation: one of a warp, or it would be repeated.

    Raises:
        EmulationError: several threads of a warp issue it.
    """
    threads = threads_of(t, where)
    if len(set(threads // 32)) < len(threads):
        raise EmulationError(f"{len(threads)} threads issue what one thread of a warp should")
    return threads.tolist()


def _shared_bytes(cta: Any, start: int, size: int, swizzle: int) -> np.ndarray:
    """Offsets in shared memory of a box's bytes in order, 16 at a time."""
    if start % 128 or start + size > cta.shared.size:
        raise EmulationError(f"a box of {size} bytes at shared address {start:#x}: unaligned or past the end")
    return swizzled(np.arange(start, start + size, 16), swizzle)


def _load(decoder: Decoder, instruction: Instruction, rank: int, modifiers: list[str]) -> Run:
    target, source, barrier, *more = instruction.operands
    destination, arrival = decoder.address(target), decoder.address(barrier)
    tensor, coordinates = _tensor(decoder, source, rank)
    multicast = decoder.read(more[0], KINDS["u16"]) if "multicast::cluster" in modifiers else None

    def run(t: Any, where: Any) -> None:
        for thread in issuers(t, where):
            issue(t, thread)

    def issue(t: Any, thread: int) -> None:
        cluster = t.cta.cluster
        found = _map_at(t, int(addresses(t, tensor)[thread]))
        at, on = int(addresses(t, destination)[thread]), int(addresses(t, arrival)[thread])
        place = [int(t[S32][c][thread]) for c in coordinates]
        ranks = [at >> RANK_SHIFT]
        signalled = [on]
        if multicast is not None:
            mask = int(t[KINDS["u16"]][multicast][thread])
            ranks = [r for r in range(16) if mask >> r & 1]
            if ranks and ranks[-1] >= len(cluster.ctas):
                raise EmulationError(f"multicast to CTA mask {mask:#x} of a cluster of {len(cluster.ctas)}")
            signalled = [r << RANK_SHIFT | on & LOW for r in ranks]
        for address in signalled:
            t.cta.barrier(address)  # exists, before anything is late

        def copy() -> None:
            data = found.load(place).view(np.uint64).reshape(-1, 2)
            for r, address in zip(ranks, signalled, strict=True):
                cta = cluster.ctas[r]
                index = _shared_bytes(cta, at & LOW, found.box_bytes, found.swizzle) >> 3
                cta.shared.views[8][index[:, None] + np.arange(2)] = data
                t.cta.barrier(address).complete(found.box_bytes)

        cluster.later("copy", copy)

    return run


def _store(decoder: Decoder, instruction: Instruction, rank: int) -> Run:
    target, source = instruction.operands[:2]
    tensor, coordinates = _tensor(decoder, target, rank)
    origin = decoder.address(source)

    def run(t: Any, where: Any) -> None:
        for thread in issuers(t, where):
            issue(t, thread)

    def issue(t: Any, thread: int) -> None:
        cta = t.cta
        found = _map_at(t, int(addresses(t, tensor)[thread]))
        at = int(addresses(t, origin)[thread]) & LOW
        place = [int(t[S32][c][thread]) for c in coordinates]

        def copy() -> None:
            index = _shared_bytes(cta, at, found.box_bytes, found.swizzle) >> 3
            found.store(place, cta.shared.views[8][index[:, None] + np.arange(2)].reshape(-1).view(np.uint8))

        if cta.cluster.now("store"):
            copy()
        else:
            _groups(cta, t.low + thread)[-1].append(copy)

    return run


def _groups(cta: Any, thread: int) -> list[list[Any]]:
    """Bulk groups of a thread, the open one last."""
    return cta.bulk_stores.setdefault(thread, [[]])


def commit(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`cp.async.bulk.commit_group`: close the thread's group of bulk copies."""

    def run(t: Any, where: Any) -> None:
        for thread in threads_of(t, where):
            if t.low + thread in t.cta.bulk_stores:
                _groups(t.cta, t.low + thread).append([])

    return run


def wait(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`cp.async.bulk.wait_group`: all but the thread's last groups are done (with `.read`, have been read)."""
    most = immediate(instruction.operands[0])

    def run(t: Any, where: Any) -> None:
        stores = t.cta.bulk_stores
        for thread in [k for k in stores if t.low <= k < t.high and (where is True or where[k - t.low])]:
            *closed, opened = stores[thread]
            done, kept = (closed[:-most], closed[-most:]) if most else (closed, [])
            for work in (w for group in done for w in group):
                work()
            stores[thread] = [*kept, opened]

    return run


def barrier_init(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mbarrier.init`."""
    address, count = decoder.address(instruction.operands[0]), decoder.read(instruction.operands[1], U32)

    def run(t: Any, where: Any) -> None:
        at = addresses(t, address)
        for thread in threads_of(t, where):
            offset, number = int(at[thread]) & LOW, int(t[U32][count][thread])
            if offset % 8 or not 0 < number < 1 << 20:
                raise EmulationError(f"an mbarrier at {offset:#x} for {number} arrivals")
            t.cta.barriers[offset] = Barrier(number, number)

    return run


def barrier_arrive(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mbarrier.arrive`, with `.expect_tx` and `.noComplete`."""
    known = {"release", "relaxed", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64", "expect_tx"}
    unknown = [r for r in rest if r not in known | {"noComplete"}]
    if unknown:
        raise PtxError(f"modifier .{unknown[0]} is not known")
    operands = instruction.operands
    if isinstance(operands[0], Address):
        operands = ("_", *operands)
    state, address = decoder.write(operands[0], U64), decoder.address(operands[1])
    number = decoder.read(operands[2], U32) if len(operands) > 2 else None
    expects, completes = "expect_tx" in rest, "noComplete" not in rest

    def run(t: Any, where: Any) -> None:
        at = addresses(t, address)
        threads = threads_of(t, where)
        for offset in dict.fromkeys(at[threads].tolist()):
            those = threads[at[threads] == offset]
            found = t.cta.barrier(int(offset))
            total = len(those) if number is None else int(t[U32][number][those].sum())
            phase = found.phase
            if expects:
                found.expect(total)
                total = len(those)
            found.arrive(total)
            if not completes and found.phase != phase:
                raise EmulationError(f"an arrival marked noComplete completes the {found}")
        np.copyto(t[U64][state], np.uint64(0), where=where)

    return run


def barrier_expect(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mbarrier.expect_tx`: expect bytes without arriving."""
    address, number = decoder.address(instruction.operands[0]), decoder.read(instruction.operands[1], U32)

    def run(t: Any, where: Any) -> None:
        at = addresses(t, address)
        for thread in threads_of(t, where):
            t.cta.barrier(int(at[thread])).expect(int(t[U32][number][thread]))

    return run


TABLE = {
    "cp.async.bulk.tensor": (tensor_copy, False),
    "cp.async.bulk.commit_group": (commit, False),
    "cp.async.bulk.wait_group": (wait, False),
    "mbarrier.init": (barrier_init, False),
    "mbarrier.arrive": (barrier_arrive, False),
    "mbarrier.expect_tx": (barrier_expect, False),
}
