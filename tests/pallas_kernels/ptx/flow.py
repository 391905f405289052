"""Control flow: branches, reconvergence, barriers of threads and the end of a thread."""

import functools
import itertools
from typing import Any

import numpy as np

from ptx.decode import KINDS, Decoded, Decoder, Run
from ptx.memory import EmulationError
from ptx.parser import Instruction, PtxError

WARP = 32
PRED, U32 = KINDS["pred"], KINDS["u32"]


@functools.cache
def blocks(decoder: Decoder) -> list[tuple[list[Decoded], int]]:
    """For every instruction: those from it to the next that decides where to go on or is gone to, and where that is."""
    code = decoder.code
    targets = {d.instruction.target for d in code}
    found: list[tuple[list[Decoded], int]] = [([], len(code))] * (len(code) + 1)
    for pc in range(len(code) - 1, -1, -1):
        if code[pc].control:
            found[pc] = ([], pc)
        elif pc + 1 in targets or pc + 1 == len(code) or code[pc + 1].control:
            found[pc] = ([code[pc]], pc + 1)
        else:
            found[pc] = ([code[pc], *found[pc + 1][0]], found[pc + 1][1])
    return found


@functools.cache
def post_dominators(decoder: Decoder) -> list[int]:
    """For every instruction, the first that all paths from it to the end pass through; the length of the code is last.

    Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm", on the reversed graph.
    """
    code = decoder.code
    end = len(code)
    after: list[list[int]] = []
    for pc, d in enumerate(code):
        opcode, guarded = d.instruction.parts[0], d.instruction.guard is not None
        targets = [d.instruction.target] if opcode == "bra" else [end] if opcode in ("ret", "exit") else []
        after.append([t for t in targets if t is not None] + ([pc + 1] if guarded or not targets else []))
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for pc, following in enumerate(after):
        for target in following:
            before[target].append(pc)
    order, number, stack = [], {}, [(end, iter(before[end]))]
    seen = {end}
    while stack:  # depth-first from the end: a node is numbered when all that leads to it has been
        node, rest = stack[-1]
        found = next((p for p in rest if p not in seen), None)
        if found is None:
            stack.pop()
            number[node] = len(order)
            order.append(node)
        else:
            seen.add(found)
            stack.append((found, iter(before[found])))
    immediate_of: dict[int, int] = {end: end}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            candidates = [f for f in after[node] if f in immediate_of]
            if not candidates:
                continue
            common = candidates[0]
            for other in candidates[1:]:
                while common != other:
                    while number[common] < number[other]:
                        common = immediate_of[common]
                    while number[other] < number[common]:
                        other = immediate_of[other]
            if immediate_of.get(node) != common:
                immediate_of[node], changed = common, True
    return [immediate_of.get(pc, end) for pc in range(end)]


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """First and end of each run of equal values."""
    edges = [0, *(np.nonzero(values[1:] != values[:-1])[0] + 1).tolist(), len(values)]
    return list(itertools.pairwise(edges))


def branch(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`bra`: warps that agree go their way; a warp that does not is masked until its threads meet again."""
    target = instruction.target
    assert target is not None

    def run(group: Any, where: Any) -> Any:
        from ptx.machine import Piece

        if where is True:
            return target
        active = np.ones_like(where) if group.mask is None else group.mask
        taken, there = where.reshape(-1, WARP), active.reshape(-1, WARP)
        # Of each warp: 0, it goes on; 1, it branches; 2, its threads part.
        way = np.where((taken == there).all(1), 1, np.where(taken.any(1), 2, 0))
        if group.mask is not None:
            way[~there.any(1)] = way[there.any(1)].max()  # a warp without active threads goes along
        if (way == way[0]).all():
            if way[0] < 2:
                return target if way[0] else None
            meeting = post_dominators(group.cta.cluster.decoder)[group.pc]
            group.stack.append((meeting, group.mask, group.meeting))
            group.stack.append((target, where.copy(), meeting))
            group.mask, group.meeting = active & ~where, meeting
            return None
        if group.mask is not None:
            raise EmulationError("warps part ways where threads of one warp have, which is not implemented")
        return [
            Piece(group.low + WARP * a, group.low + WARP * b, (group.pc + 1, target, group.pc)[way[a]])
            for a, b in runs(way)
        ]

    return run


def leave(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`ret`, `exit`: the end of a thread."""

    def run(group: Any, where: Any) -> Any:
        from ptx.machine import Piece

        if where is not True and group.mask is None:
            ends = where.reshape(-1, WARP)
            if not (ends.all(1) | ~ends.any(1)).all():
                raise EmulationError("threads of one warp end at different places, which is not implemented")
            return [
                Piece(group.low + WARP * a, group.low + WARP * b, -1 if ends[a, 0] else group.pc + 1)
                for a, b in runs(ends[:, 0])
            ]
        if group.stack:
            raise EmulationError("threads of one warp end at different places, which is not implemented")
        return -1

    return run


def barrier(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`bar.sync`, `barrier.sync`, `bar.arrive`: threads of a CTA meet at a numbered barrier."""
    rest = tuple(r for r in rest if r not in ("cta", "aligned"))
    if rest not in (("sync",), ("arrive",)):
        raise PtxError(f"barrier operation {'.'.join(rest)!r} is not known")
    waits = rest == ("sync",)
    number = decoder.read(instruction.operands[0], U32)
    count = decoder.read(instruction.operands[1], U32) if len(instruction.operands) > 1 else None

    def run(group: Any, where: Any) -> Any:
        from ptx.machine import Piece, Wait

        cta, frame = group.cta, group.frame
        if where is not True and not where.reshape(-1, WARP).any(1).all():
            raise EmulationError("a barrier is predicated per warp, which is not implemented")
        numbers = frame[U32][number][::WARP]
        counts = frame[U32][count][::WARP] if count is not None else np.full(frame.warps, cta.threads)
        tickets = np.zeros(frame.warps, np.int64)
        for first, end in runs(numbers):
            state = cta.named.setdefault(int(numbers[first]), [0, 0])  # threads that have come, generation
            tickets[first:end] = state[1]
            state[0] += WARP * (end - first)
            if state[0] > int(counts[first]):
                raise EmulationError(f"{state[0]} threads at barrier {numbers[first]}, which is for {counts[first]}")
            if state[0] == int(counts[first]):
                state[0] = 0
                state[1] += 1
        passed = np.array([cta.named[int(n)][1] > t for n, t in zip(numbers, tickets, strict=True)])
        if not waits or passed.all():
            return None
        pieces = []
        for first, end in runs(numbers.astype(np.int64) * 2 + passed):
            state, ticket = cta.named[int(numbers[first])], int(tickets[first])
            wait = None
            if not passed[first]:
                wait = Wait(
                    lambda state=state, ticket=ticket: state[1] > ticket,
                    lambda state=state, at=first: f"barrier {numbers[at]} ({state[0]} of {counts[at]} threads there)",
                )
            pieces.append(Piece(group.low + WARP * first, group.low + WARP * end, group.pc + 1, wait))
        return pieces

    return run


def cluster_barrier(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`barrier.cluster.arrive` and `.wait`: all threads of a cluster meet."""
    if rest[0] not in ("arrive", "wait"):
        raise PtxError(f"barrier.cluster.{rest[0]} is not known")

    def run(group: Any, where: Any) -> Any:
        from ptx.machine import Piece, Wait

        cta, cluster = group.cta, group.cta.cluster
        warps = slice(group.low // WARP, group.high // WARP)
        if rest[0] == "arrive":
            cta.cluster_tickets[warps] = cluster.generation + 1
            cluster.arrived += group.high - group.low
            if cluster.arrived == sum(c.threads for c in cluster.ctas):
                cluster.arrived = 0
                cluster.generation += 1
            return None
        ticket = int(cta.cluster_tickets[warps].max())
        if cluster.generation >= ticket:
            return None
        wait = Wait(lambda: cluster.generation >= ticket, lambda: f"the cluster ({cluster.arrived} threads there)")
        return [Piece(group.low, group.high, group.pc + 1, wait)]

    return run


def wait_parity(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mbarrier.try_wait.parity`: go on when the phase of this parity is complete. It never gives up waiting."""
    operands = instruction.operands
    if "parity" not in rest:
        raise PtxError("mbarrier waits other than by parity are not known")
    done = decoder.write(operands[0], PRED)
    address, parity = decoder.address(operands[1]), decoder.read(operands[2], U32)

    def run(group: Any, where: Any) -> Any:
        from ptx.decode import addresses
        from ptx.machine import Piece, Wait

        frame, cta = group.frame, group.cta
        at, parities = addresses(frame, address), frame[U32][parity]
        lanes = np.arange(0, frame.size, WARP)
        if where is not True:
            lanes = (lanes + where.reshape(-1, WARP).argmax(1))[where.reshape(-1, WARP).any(1)]
        keys = [(cta.barrier(int(at[i])), int(parities[i]) & 1) for i in lanes]
        passed = np.array([b.passed(p) for b, p in keys])
        if passed.all():
            np.copyto(frame[PRED][done], True, where=where)
            return None
        if len(keys) < frame.warps:  # some warps have no active threads: they wait with the others
            missing = next(k for k, done in zip(keys, passed, strict=True) if not done)
            keys, lanes = [missing] * frame.warps, np.full(frame.warps, lanes[0])
        identity = np.array([id(b) * 2 + p for b, p in keys])
        pieces = []
        for first, end in runs(identity):
            found, phase = keys[first]
            wait = None
            if not found.passed(phase):
                offset = int(at[lanes[first]])
                wait = Wait(
                    lambda found=found, phase=phase: found.passed(phase),
                    lambda found=found, phase=phase, at=offset: f"parity {phase} of the {found} at {at:#x}",
                )
            pieces.append(Piece(group.low + WARP * first, group.low + WARP * end, group.pc, wait))
        return pieces

    return run


def nothing(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """Orders memory or hints at what comes: nothing to do where every access is seen at once."""
    return lambda frame, where: None


TABLE = {
    "bra": (branch, True),
    "ret": (leave, True),
    "exit": (leave, True),
    "bar": (barrier, True),
    "barrier": (barrier, True),
    "barrier.cluster": (cluster_barrier, True),
    "mbarrier.try_wait": (wait_parity, True),
    "bar.warp": (nothing, False),
    "fence": (nothing, False),
    "membar": (nothing, False),
    "griddepcontrol": (nothing, False),
    "prefetch": (nothing, False),
    "nanosleep": (nothing, False),
    "wgmma.fence": (nothing, False),
    "tcgen05.fence::before_thread_sync": (nothing, False),
    "tcgen05.fence::after_thread_sync": (nothing, False),
    "tcgen05.relinquish_alloc_permit": (nothing, False),
    "setmaxnreg": (nothing, False),
}
