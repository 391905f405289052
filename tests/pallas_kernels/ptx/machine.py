"""A cluster of CTAs executing a program: groups of warps in lockstep, what runs beside them, and who goes on next.

A *group* is a run of neighbouring warps at the same instruction, executed by one NumPy operation over all their
threads. A group splits where its warps part ways and merges when neighbours meet. Threads that part ways inside a warp
are masked, and meet again at the branch's immediate post-dominator.

Asynchronous work (bulk copies, wgmma, tcgen05) is queued when it is issued. `Order` says when it happens: as late as
the program's own waits allow, at once, or at random; so a missing wait reads what was there before, and an early
release is overwritten.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ptx import flow
from ptx.decode import CLASSES, DTYPES, WIDTHS, Decoder
from ptx.memory import PARAMETERS, RANK_SHIFT, Barrier, Bytes, DeadlockError, EmulationError, Memory, TensorMap
from ptx.parser import PtxError

WARP = 32
SHARED_LIMIT = 232_448
"""Most shared memory of a CTA on sm_90, sm_100 and sm_103."""


@dataclasses.dataclass(frozen=True)
class Order:
    """When things happen. Without a seed: groups go on as long as they can, and asynchronous work is late.

    `early` names kinds of asynchronous work that happen at once instead: "copy", "store", "mma". With a seed, groups
    take turns at random and asynchronous work happens at any time that its order allows.
    """

    seed: int | None = None
    early: frozenset[str] = frozenset()


@dataclasses.dataclass
class Wait:
    """Why a group does not go on."""

    ready: Callable[[], bool]
    text: Callable[[], str]


@dataclasses.dataclass
class Piece:
    """Where part of a group goes on: its threads, its next instruction (−1: it ends), and what it waits for."""

    low: int
    high: int
    pc: int
    wait: Wait | None = None


class Frame(list):
    """The registers of a group: by kind of view, by row, an array over its threads."""

    def __init__(self, cta: "Cta", low: int, high: int) -> None:
        classes = {width: array[:, low:high] for width, array in cta.registers.items()}
        super().__init__(list(classes[WIDTHS[name]].view(dtype)) for name, dtype in DTYPES.items())
        self.cta, self.low, self.high = cta, low, high
        self.size, self.warps = high - low, (high - low) // WARP


@dataclasses.dataclass
class Group:
    """Threads low..high of a CTA in lockstep. `stack` holds what waits at a reconvergence: (pc, mask, own meeting)."""

    cta: "Cta"
    low: int
    high: int
    pc: int = 0
    wait: Wait | None = None
    mask: np.ndarray | None = None
    meeting: int | None = None
    stack: list[tuple[int, np.ndarray | None, int | None]] = dataclasses.field(default_factory=list)

    @property
    def frame(self) -> Frame:
        """Views of the registers of these threads."""
        return self.cta.frame(self.low, self.high)

    def active(self, where: Any) -> np.ndarray:
        """The mask that an instruction runs under, as an array over the group's threads."""
        return np.ones(self.high - self.low, bool) if where is True else where

    def part(self, piece: Piece) -> "Group":
        """The threads of a piece, with their share of the masks."""

        def cut(mask: np.ndarray | None) -> np.ndarray | None:
            return None if mask is None else mask[piece.low - self.low : piece.high - self.low]

        stack = [(pc, cut(mask), meeting) for pc, mask, meeting in self.stack]
        return Group(self.cta, piece.low, piece.high, piece.pc, piece.wait, cut(self.mask), self.meeting, stack)


class Cta:
    """A CTA: registers of its threads, its shared and tensor memory, its barriers."""

    def __init__(self, cluster: "Cluster", rank: int, index: tuple[int, int, int]) -> None:
        launch, decoder = cluster.launch, cluster.decoder
        self.cluster, self.rank, self.index = cluster, rank, index
        self.threads = int(np.prod(launch.block))
        self.shared = cluster.shared[rank]
        self.memory = Memory(cluster.shared, rank, launch.buffers, launch.parameters)
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list[int]] = {}
        self.cluster_tickets = np.zeros(self.threads // WARP, int)
        self.tensor_memory = np.full((128, 512), 0xFFFFFFFF, np.uint32)
        self.tensor_columns: dict[int, int] = {}
        self.warpgroup_products: dict[int, list[list[Callable[[], None]]]] = {}
        self.tensor_stores: dict[int, list[Callable[[], None]]] = {}
        self.bulk_stores: dict[int, list[list[Callable[[], None]]]] = {}
        self.registers = {w: np.full((max(decoder.counts[w], 1), self.threads), -1, np.int64).astype(c)
                          for w, c in CLASSES.items()}  # fmt: skip
        self._frames: dict[tuple[int, int], Frame] = {}
        for width, constants in decoder.constants.items():
            for row, bits in constants:
                self.registers[width][row] = bits
        for width, row, name in decoder.specials:
            self.registers[width][row] = self._special(name)
        program = decoder.program
        for width, row, name in decoder.addresses:
            shared = name in program.shared
            base = rank << RANK_SHIFT if shared else PARAMETERS
            self.registers[width][row] = base + (program.shared if shared else program.parameters)[name]

    def _special(self, name: str) -> Any:
        launch, thread = self.cluster.launch, np.arange(self.threads)
        name, _, axis = name[1:].partition(".")
        a = "xyz".index(axis) if axis else 0
        size = launch.cluster
        values = {
            "tid": lambda: thread // int(np.prod(launch.block[:a], dtype=int)) % launch.block[a],
            "ntid": lambda: launch.block[a],
            "ctaid": lambda: self.index[a],
            "nctaid": lambda: launch.grid[a],
            "cluster_ctaid": lambda: self.index[a] % size[a],
            "cluster_nctaid": lambda: size[a],
            "clusterid": lambda: self.index[a] // size[a],
            "laneid": lambda: thread % WARP,
            "warpid": lambda: thread // WARP,
            "cluster_ctarank": lambda: self.rank,
            "cluster_nctarank": lambda: int(np.prod(size)),
        }
        return values[name]()

    def frame(self, low: int, high: int) -> Frame:
        """Views of the registers of some threads, made once."""
        if (low, high) not in self._frames:
            self._frames[low, high] = Frame(self, low, high)
        return self._frames[low, high]

    def barrier(self, address: int) -> Barrier:
        """The mbarrier at an address of the cluster.

        Raises:
            EmulationError: none was initialised there.
        """
        owner = self.cluster.ctas[address >> RANK_SHIFT] if address >> RANK_SHIFT < len(self.cluster.ctas) else self
        offset = address & ((1 << RANK_SHIFT) - 1)
        if offset not in owner.barriers:
            raise EmulationError(f"there is no mbarrier at shared address {offset:#x} of CTA rank {owner.rank}")
        return owner.barriers[offset]


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a kernel is launched with. `tensor_maps` are keyed by their address in parameter memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    buffers: tuple[Bytes, ...]
    parameters: Bytes
    tensor_maps: dict[int, TensorMap]


class Cluster:
    """The CTAs that share a cluster (one, where a kernel has none), run to their end by `run`."""

    def __init__(
        self,
        decoder: Decoder,
        launch: Launch,
        first: tuple[int, int, int],
        order: Order,
        waiting: deque[tuple[int, int, int]] | None = None,
    ) -> None:
        shared = decoder.program.shared_bytes + launch.dynamic_shared_bytes
        if shared > SHARED_LIMIT:
            raise EmulationError(f"a CTA asks for {shared} bytes of shared memory, at most {SHARED_LIMIT} exist")
        self.decoder, self.launch, self.order = decoder, launch, order
        self.waiting = deque() if waiting is None else waiting
        size = launch.cluster
        ranks = [(x, y, z) for z in range(size[2]) for y in range(size[1]) for x in range(size[0])]
        self.shared = [
            Bytes(np.full(shared, 0xFF, np.uint8), f"shared memory of CTA rank {r}") for r in range(len(ranks))
        ]
        indices = [(first[0] + x, first[1] + y, first[2] + z) for x, y, z in ranks]
        self.ctas = [Cta(self, rank, index) for rank, index in enumerate(indices)]
        self.random = None if order.seed is None else np.random.default_rng([order.seed, *first])
        self.queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self.arrived, self.generation, self._unique = 0, 0, 0
        self.groups = [Group(cta, 0, cta.threads) for cta in self.ctas]
        self.blocks = flow.blocks(decoder)
        self.instructions = 0

    def later(self, kind: str, work: Callable[[], None], queue: Hashable = None) -> None:
        """Do asynchronous work at once or at some time; work of the same queue keeps its order."""
        if queue is None:
            self._unique += 1
            queue = self._unique
        waiting = self.queues.get(queue)
        if waiting is None and self.now(kind):
            work()
            return
        self.queues.setdefault(queue, deque()).append(work)

    def take_over(self) -> tuple[int, int, int] | None:
        """First CTA of a cluster that has not begun, whose work this one does from now on; None if there is none."""
        if not self.waiting or (self.random is not None and self.random.integers(2)):
            return None
        return self.waiting.popleft()

    def now(self, kind: str) -> bool:
        """Whether work of this kind happens when it is issued."""
        return kind in self.order.early if self.random is None else bool(self.random.integers(2))

    def proceed(self) -> bool:
        """Do one piece of the asynchronous work that may happen now; False if there is none."""
        if not self.queues:
            return False
        keys = list(self.queues)
        key = keys[0] if self.random is None else keys[int(self.random.integers(len(keys)))]
        queue = self.queues[key]
        work = queue.popleft()
        if not queue:
            del self.queues[key]
        work()
        return True

    def run(self) -> None:
        """Run all CTAs to their end.

        Raises:
            DeadlockError: all threads wait for what cannot come.
            EmulationError: a fault of the program; the message names the instruction.
        """
        with np.errstate(all="ignore"):
            while self.groups:
                if self.random is not None and self.random.integers(2):
                    self.proceed()
                runnable = [g for g in self.groups if g.wait is None or g.wait.ready()]
                if not runnable:
                    if not self.proceed():
                        raise DeadlockError("\n".join(["every thread waits:", *map(self._state, self.groups)]))
                    continue
                if self.random is None:
                    group = self._merge(runnable)
                else:
                    group = runnable[int(self.random.integers(len(runnable)))]
                group.wait = None
                index = self.groups.index(group)
                self.groups[index : index + 1] = self._advance(group)
            while self.proceed():
                pass
            for cta in self.ctas:
                for stores in cta.bulk_stores.values():
                    for work in (w for s in stores for w in s):
                        work()
            self._check_end()

    def _check_end(self) -> None:
        for cta in self.ctas:
            for address, barrier in sorted(cta.barriers.items()):
                if not barrier.balanced:
                    raise EmulationError(f"at the end, {barrier} at shared address {address:#x} of CTA {cta.index}")
            if cta.tensor_columns:
                raise EmulationError(f"at the end, tensor memory columns {cta.tensor_columns} are still allocated")

    def _state(self, group: Group) -> str:
        where = f"CTA {group.cta.index} threads {group.low}..{group.high - 1}"
        instruction = self.decoder.code[group.pc].instruction if group.pc < len(self.decoder.code) else "the end"
        return f"  {where} for {group.wait.text() if group.wait else 'nothing'}, at {instruction}"

    def _merge(self, runnable: list[Group]) -> Group:
        """The first group that can go on, with the neighbours that stand at the same instruction."""
        group = runnable[0]
        for other in runnable[1:]:
            same = other.cta is group.cta and other.pc == group.pc and other.low == group.high
            if same and group.mask is None and other.mask is None and not group.stack and not other.stack:
                group.high = other.high
                self.groups.remove(other)
        return group

    def _advance(self, group: Group) -> list[Group]:
        """Run a group until it waits, ends or splits; what becomes of it."""
        turns = 1 << 30 if self.random is None else int(self.random.integers(1, 20))
        frame = group.frame
        code, blocks = self.decoder.code, self.blocks
        pc = group.pc
        decoded = code[pc]
        try:
            while True:
                if group.meeting is not None and pc == group.meeting:
                    pc, group.mask, group.meeting = group.stack.pop()
                    continue
                straight, pc = blocks[pc]
                for decoded in straight:
                    if decoded.guard is None:
                        decoded.run(frame, True if group.mask is None else group.mask)
                    else:
                        where = self._where(group, frame, decoded)
                        if where.any():
                            decoded.run(frame, where)
                self.instructions += len(straight)
                if pc == len(code) or pc == group.meeting or not code[pc].control:
                    continue
                decoded = code[pc]
                self.instructions += 1
                where = True if group.mask is None else group.mask
                if decoded.guard is not None:
                    where = self._where(group, frame, decoded)
                group.pc = pc
                outcome = decoded.run(group, where)
                if outcome is None:
                    pc += 1
                elif isinstance(outcome, int):
                    pc = group.pc = outcome
                    if pc < 0:
                        return []
                else:
                    return [group.part(piece) for piece in outcome if piece.pc >= 0]
                turns -= 1
                if turns <= 0:
                    group.pc = pc
                    return [group]
        except DeadlockError:
            raise
        except (EmulationError, PtxError, IndexError, ValueError) as error:
            where = f"CTA {group.cta.index}, threads {group.low}..{group.high - 1}"
            raise EmulationError(f"{where}, {decoded.instruction}: {error}") from error

    def _where(self, group: Group, frame: Frame, decoded: Any) -> np.ndarray:
        where = frame[0][decoded.guard]
        if decoded.negated:
            where = ~where
        return where.copy() if group.mask is None else where & group.mask
