"""Loads and stores of threads, and what moves values between the threads of a warp."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.decode import KINDS, WIDTHS, Decoder, Run, addresses, items, kind_of, pair
from ptx.memory import RANK_SHIFT, EmulationError
from ptx.parser import Instruction, PtxError

PRED, U32 = KINDS["pred"], KINDS["u32"]
LANES = np.arange(32)
_STATE = {"global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const", "local"}
_HINTS = {"relaxed", "acquire", "release", "weak", "volatile", "cta", "cluster", "gpu", "sys", "nc", "L1::no_allocate"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def _form(instruction: Instruction, rest: tuple[str, ...]) -> tuple[int, str]:
    """Number of values, and their type."""
    *others, type_name = rest
    unknown = [o for o in others if o not in _STATE | _HINTS and o not in _VECTORS]
    if unknown or "local" in others:
        raise PtxError(f"modifier .{(unknown or ['local'])[0]} is not known")
    return next((_VECTORS[o] for o in others if o in _VECTORS), 1), type_name


def load(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`ld`: a narrower type than the register is extended by its sign."""
    count, type_name = _form(instruction, rest)
    target, source = instruction.operands
    registers = items(target)
    if len(registers) != count:
        raise PtxError(f"{len(registers)} registers for {count} values")
    address = decoder.address(source)
    width = int(type_name[1:]) // 8
    held = min(decoder.width(registers[0]) or 32, 64)
    kind = kind_of(("s" if type_name.startswith("s") else "u") + str(held))
    rows = [decoder.write(r, kind) for r in registers]
    signed = np.dtype(f"i{width}") if type_name.startswith("s") else None
    span, width = width * count, min(width, 8)

    def run(t: Any, where: Any) -> None:
        at, active = addresses(t, address), None
        if where is not True:
            active = np.nonzero(where)[0]
            at = at[active]
        for block, offsets, threads in t.cta.memory.split(at):
            view = block.views[width]
            index = block.index(offsets, width, span)
            whole = active is None and isinstance(threads, slice)
            chosen = None if whole else (np.arange(t.size)[threads] if active is None else active[threads])
            for i, row in enumerate(rows):
                values = view[index + i] if i else view[index]
                if signed is not None:
                    values = values.view(signed)
                if whole:
                    t[kind][row][...] = values
                else:
                    t[kind][row][chosen] = values

    return run


def store(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`st`."""
    count, type_name = _form(instruction, rest)
    target, source = instruction.operands
    registers = items(source)
    if len(registers) != count:
        raise PtxError(f"{len(registers)} registers for {count} values")
    address = decoder.address(target)
    width = int(type_name[1:]) // 8
    held = decoder.width(registers[0]) or max(8 * width, 16)
    kind = kind_of(f"u{held}")
    rows = [decoder.read(r, kind) for r in registers]
    span = width * count

    def run(t: Any, where: Any) -> None:
        at, active = addresses(t, address), slice(None)
        if where is not True:
            active = np.nonzero(where)[0]
            at = at[active]
        for block, offsets, threads in t.cta.memory.split(at):
            view = block.views[width]
            index = block.index(offsets, width, span)
            for i, row in enumerate(rows):
                view[index + i] = t[kind][row][active][threads].astype(view.dtype, copy=False)

    return run


def ldmatrix(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`ldmatrix`: 8 × 8 matrices of 16-bit values whose rows of 16 bytes lie at addresses that eight lanes each give.

    Lane l receives elements 2 (l mod 4) and the next of row l / 4; with `.trans` of column l / 4.
    """
    count, transposed = _matrices(rest)
    rows = [decoder.write(r, U32) for r in items(instruction.operands[0])]
    address = decoder.address(instruction.operands[1])
    if len(rows) != count:
        raise PtxError(f"{len(rows)} registers for {count} matrices")

    def run(t: Any, where: Any) -> None:
        if where is not True:
            raise EmulationError("ldmatrix takes all threads of a warp")
        at = addresses(t, address).reshape(t.warps, 32)[:, : 8 * count].reshape(-1)
        ((block, offsets, _),) = t.cta.memory.split(at)
        first = block.index(offsets, 2, 16)
        # matrices: warp, matrix, row, column
        matrices = block.views[2][first[:, None] + np.arange(8)].reshape(t.warps, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        words = np.ascontiguousarray(matrices).view(np.uint32)  # warp, matrix, row, pair
        for i, row in enumerate(rows):
            t[U32][row][...] = words[:, i].reshape(-1)

    return run


def stmatrix(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`stmatrix`: the inverse of `ldmatrix`."""
    count, transposed = _matrices(rest)
    address = decoder.address(instruction.operands[0])
    rows = [decoder.read(r, U32) for r in items(instruction.operands[1])]
    if len(rows) != count:
        raise PtxError(f"{len(rows)} registers for {count} matrices")

    def run(t: Any, where: Any) -> None:
        if where is not True:
            raise EmulationError("stmatrix takes all threads of a warp")
        at = addresses(t, address).reshape(t.warps, 32)[:, : 8 * count].reshape(-1)
        ((block, offsets, _),) = t.cta.memory.split(at)
        first = block.index(offsets, 2, 16)
        words = np.stack([t[U32][r] for r in rows], 1).reshape(t.warps, 32, count)
        matrices = np.ascontiguousarray(words.swapaxes(1, 2)).view(np.uint16).reshape(t.warps, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        block.views[2][first[:, None] + np.arange(8)] = matrices.reshape(-1, 8)

    return run


def _matrices(rest: tuple[str, ...]) -> tuple[int, bool]:
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    unknown = [r for r in rest if r not in known]
    if unknown:
        raise PtxError(f"modifier .{unknown[0]} is not known")
    return next((int(r[1:]) for r in rest if r in ("x1", "x2", "x4")), 1), "trans" in rest


def _shuffled_lane(mode: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """The lane that each lane reads, and whether it lies in bounds, from (lane, b, c) as the manual defines them."""

    def bounds(c: Any) -> tuple[Any, Any]:
        segment = (c >> 8) & 31
        clamp = c & 31
        return (LANES & segment) | (clamp & ~segment & 31), LANES & segment

    def source(lane: Any, b: Any, c: Any) -> tuple[Any, Any]:
        most, least = bounds(c)
        if mode == "idx":
            from_lane = least | (b & 31 & ~((c >> 8) & 31))
            return from_lane, from_lane <= most
        if mode == "bfly":
            from_lane = lane ^ (b & 31)
            return from_lane, from_lane <= most
        if mode == "up":
            from_lane = lane - (b & 31)
            return from_lane, from_lane >= most
        from_lane = lane + (b & 31)
        return from_lane, from_lane <= most

    return source


def shfl(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`shfl.sync`: a value of another lane, the own one where that lies out of bounds."""
    if rest[0] != "sync" or rest[1] not in ("idx", "bfly", "up", "down"):
        raise PtxError(f"shuffle {'.'.join(rest)} is not known")
    lane_of = _shuffled_lane(rest[1])
    d, p = pair(instruction.operands[0])
    value, predicate = decoder.write(d, U32), decoder.write(p, PRED) if p != "_" else None
    a, b, c = (decoder.read(o, U32) for o in instruction.operands[1:4])

    def run(t: Any, where: Any) -> None:
        shape = (t.warps, 32)
        x = t[U32][a].reshape(shape)
        lane, inside = lane_of(LANES, *(t[U32][r].reshape(shape).astype(np.int64) for r in (b, c)))
        lane, inside = np.broadcast_arrays(lane, inside)
        lane = np.where(inside, lane, LANES)
        np.copyto(t[U32][value], np.take_along_axis(x, lane, 1).reshape(-1), where=where)
        if predicate is not None:
            np.copyto(t[PRED][predicate], inside.reshape(-1), where=where)

    return run


def elect(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`elect.sync`: one lane of the mask leads; here the first that is active."""
    d, p = pair(instruction.operands[0])
    lane, leads = decoder.write(d, U32), decoder.write(p, PRED)
    members = decoder.read(instruction.operands[1], U32)

    def run(t: Any, where: Any) -> None:
        mask = (t[U32][members].reshape(t.warps, 32) >> LANES.astype(np.uint32)) & 1
        if where is not True:
            mask = mask & where.reshape(t.warps, 32)
        first = mask.argmax(1)
        np.copyto(t[U32][lane], np.repeat(first, 32).astype(np.uint32), where=where)
        np.copyto(t[PRED][leads], (first[:, None] == LANES).reshape(-1), where=where)

    return run


def mapa(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mapa`: the same shared variable in another CTA of the cluster."""
    kind = kind_of(rest[-1])
    d, a, b = instruction.operands
    destination, source, rank = decoder.write(d, kind), decoder.read(a, kind), decoder.read(b, U32)
    low = (1 << RANK_SHIFT) - 1

    def run(t: Any, where: Any) -> None:
        ranks = t[U32][rank].astype(t[kind][destination].dtype)
        if where is not True:
            ranks = np.where(where, ranks, 0)
        if int(ranks.max()) >= len(t.cta.cluster.ctas):
            raise EmulationError(f"CTA rank {int(ranks.max())} of a cluster of {len(t.cta.cluster.ctas)}")
        result = (t[kind][source] & low) | (ranks << RANK_SHIFT)
        np.copyto(t[kind][destination], result, where=where)

    return run


def atomic(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`atom.add`, `red.add` and the like in global or shared memory: thread after thread."""
    *others, type_name = rest
    operation = next((o for o in others if o in ("add", "max", "min", "exch")), None)
    if operation is None:
        raise PtxError(f"atomic operation {'.'.join(rest)} is not known")
    returns = instruction.parts[0] == "atom"
    operands = instruction.operands if returns else ("_", *instruction.operands)
    kind = kind_of(type_name)
    destination, address = decoder.write(operands[0], kind), decoder.address(operands[1])
    value = decoder.read(operands[2], kind)
    width = WIDTHS[type_name.replace("b", "u")] // 8
    function = {"add": lambda x, y: x + y, "max": max, "min": min, "exch": lambda x, y: y}[operation]

    def run(t: Any, where: Any) -> None:
        at = addresses(t, address)
        dtype = t[kind][value].dtype
        for thread in range(t.size) if where is True else np.nonzero(where)[0]:
            block, base = t.cta.memory.find(int(at[thread]))
            place = block.u8[int(at[thread]) - base :][:width].view(dtype)
            old = place[0]
            place[0] = function(old, t[kind][value][thread])
            t[kind][destination][thread] = old

    return run


TABLE = {
    name: (function, False)
    for name, function in {
        "ld": load,
        "st": store,
        "ldmatrix": ldmatrix,
        "stmatrix": stmatrix,
        "shfl": shfl,
        "elect": elect,
        "mapa": mapa,
        "atom": atomic,
        "red": atomic,
    }.items()
}
