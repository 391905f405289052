"""A kernel ready to be run in the emulator: its PTX, and what its host function launches."""

import dataclasses
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ptx import host
from ptx.decode import Decoder
from ptx.machine import Cluster, Launch, Order
from ptx.memory import Bytes, EmulationError
from ptx.parser import parse


@dataclasses.dataclass(frozen=True)
class Kernel:
    """PTX of a module with one entry function, and the LLVM IR of the host's module."""

    ptx: str
    host_ir: str

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The program, decoded once."""
        return Decoder(parse(self.ptx))

    def edited(self, *edits: tuple[str, str]) -> "Kernel":
        """The kernel with the first occurrence of each text replaced, to see whether a fault is noticed.

        Raises:
            ValueError: a text does not occur.
        """
        text = self.ptx
        for old, new in edits:
            if old not in text:
                raise ValueError(f"the PTX has no {old!r}")
            text = text.replace(old, new, 1)
        return Kernel(text, self.host_ir)


@dataclasses.dataclass
class Result:
    """The results after a run, and what it took."""

    arrays: list[np.ndarray]
    instructions: int = 0
    """Executed, one for a whole group of warps."""
    copied_bytes: int = 0
    phases: list[int] = dataclasses.field(default_factory=list)
    """How many phases each mbarrier went through."""


def run(
    kernel: Kernel,
    operands: Sequence[np.ndarray],
    results: Sequence[tuple[tuple[int, ...], np.dtype]],
    *,
    aliases: Mapping[int, int] | None = None,
    order: Order | None = None,
    ctas: Iterable[int] | None = None,
) -> Result:
    """Run a kernel.

    Args:
        kernel: what to run.
        operands: arrays that it reads; to write to one is a fault.
        results: shapes and dtypes of those it writes; what it leaves unwritten is NaN, or −1.
        aliases: results that begin as an operand, by the operand's number.
        order: when things happen.
        ctas: linear numbers of the CTAs to run, all by default; of a cluster, its first one's.

    Raises:
        EmulationError: a fault of the program.
    """
    aliases, order = aliases or {}, order or Order()
    outputs = [
        Bytes(np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8), f"result {i}")
        for i, (shape, dtype) in enumerate(results)
    ]
    inputs = []
    for number, array in enumerate(operands):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).view()
        data.flags.writeable = False
        if number in aliases:
            outputs[aliases[number]].u8[: data.size] = data
            inputs.append(outputs[aliases[number]])
        else:
            inputs.append(Bytes(data, f"operand {number}"))
    launch = host.launch(kernel.host_ir, kernel.decoder.program, [*inputs, *outputs])
    result = Result([b.u8[: b.size].view(t).reshape(s) for b, (s, t) in zip(outputs, results, strict=True)])
    waiting = deque(_clusters(launch, ctas))
    while waiting:
        at = waiting.popleft()
        cluster = Cluster(kernel.decoder, launch, at, order, waiting)
        cluster.run()
        result.instructions += cluster.instructions
        for barrier in (b for cta in cluster.ctas for b in cta.barriers.values()):
            if barrier.expected_bytes != barrier.completed_bytes:
                raise EmulationError(
                    f"CTA {at}: {barrier}, {barrier.expected_bytes} and {barrier.completed_bytes} bytes"
                )
            result.copied_bytes += barrier.completed_bytes
            result.phases.append(barrier.phase)
    return result


def _clusters(launch: Launch, ctas: Iterable[int] | None) -> Iterator[tuple[int, int, int]]:
    """Coordinates of the first CTA of each cluster that is to run."""
    grid, size = launch.grid, launch.cluster
    if any(g % s for g, s in zip(grid, size, strict=True)):
        raise EmulationError(f"the grid {grid} is not made of clusters of {size}")
    chosen = None if ctas is None else set(ctas)
    for number in range(int(np.prod(grid))):
        at = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        if all(a % s == 0 for a, s in zip(at, size, strict=True)) and (chosen is None or number in chosen):
            yield at
