"""Memory of a CTA, of its cluster and of the device, and the barriers that lie in shared memory.

Addresses are one 64-bit space. Shared memory of the CTA of rank r in its cluster begins at r << 24 (so an address also
serves as one of the cluster's window), global buffers at multiples of 1 << 40, parameter memory at 1 << 60.
Everything begins as ones: NaN in every floating-point format, −1 as an integer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ptx.parser import PtxError

RANK_SHIFT = 24
GLOBAL_SHIFT = 40
PARAMETERS = 1 << 60
DESCRIPTOR_BYTES = 128


class EmulationError(Exception):
    """The program did what no correct program does; the message says what and where."""


class DeadlockError(EmulationError):
    """Every thread waits, and nothing is under way that could wake one."""


class Bytes:
    """A block of memory with views of every access width. Large data is not copied where it can only be read."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self.name, self.size = name, data.size
        padded = data
        if data.flags.writeable or data.size % 8 or data.ctypes.data % 8:
            padded = np.full(-(-data.size // 8) * 8, 0xFF, np.uint8)
            padded[: data.size] = data
            padded.flags.writeable = data.flags.writeable
        self.u8 = padded
        self.views = {1: padded, 2: padded.view(np.uint16), 4: padded.view(np.uint32), 8: padded.view(np.uint64)}

    def index(self, offsets: np.ndarray, width: int, span: int) -> np.ndarray:
        """Element numbers of byte offsets, `span` bytes read from each.

        Raises:
            EmulationError: an offset is past the end, or not a multiple of the bytes accessed.
        """
        if len(offsets) and (int(offsets.max()) + span > self.size):
            raise EmulationError(f"{span} bytes at offset {int(offsets.max())} of {self.name}, which has {self.size}")
        if (offsets % np.uint64(span)).any():
            raise EmulationError(f"{span} bytes at offset {int(offsets[0])} of {self.name} are not aligned")
        return (offsets >> np.uint64(width.bit_length() - 1)).astype(np.intp)


class Memory:
    """What one CTA can address."""

    def __init__(self, shared: Sequence[Bytes], rank: int, buffers: Sequence[Bytes], parameters: Bytes) -> None:
        self.shared, self.rank, self.buffers, self.parameters = shared, rank, buffers, parameters

    def find(self, address: int) -> tuple[Bytes, int]:
        """The block that holds an address, and where the block begins."""
        if address < len(self.shared) << RANK_SHIFT:
            rank = address >> RANK_SHIFT
            return self.shared[rank], rank << RANK_SHIFT
        if address >= PARAMETERS:
            return self.parameters, PARAMETERS
        number = (address >> GLOBAL_SHIFT) - 1
        if not 0 <= number < len(self.buffers):
            raise EmulationError(f"address {address:#x} belongs to no memory")
        return self.buffers[number], (number + 1) << GLOBAL_SHIFT

    def split(self, addresses: np.ndarray) -> list[tuple[Bytes, np.ndarray, Any]]:
        """Blocks that addresses fall into, the offsets in each, and which threads they belong to."""
        block, base = self.find(int(addresses[0]))
        offsets = addresses - np.uint64(base)
        inside = offsets < np.uint64(max(block.size, 1))
        if inside.all():
            return [(block, offsets, slice(None))]
        found, left = [(block, offsets[inside], np.nonzero(inside)[0])], np.nonzero(~inside)[0]
        if not inside.any():
            raise EmulationError(f"address {int(addresses[0]):#x} lies outside {block.name}, which has {block.size}")
        return found + [(b, o, left[i]) for b, o, i in self.split(addresses[left])]


def buffer_address(number: int) -> int:
    """Where the global buffer of this number begins."""
    return (number + 1) << GLOBAL_SHIFT


@dataclasses.dataclass
class Barrier:
    """An mbarrier: arrivals expected in a phase, arrivals and transaction bytes still pending in this one."""

    count: int
    pending: int
    transactions: int = 0
    phase: int = 0
    expected_bytes: int = 0
    completed_bytes: int = 0

    def arrive(self, count: int) -> None:
        """Count arrivals; the phase completes with the last one if no bytes are pending."""
        if count > self.pending:
            raise EmulationError(f"{count} arrivals on {self}: more than are pending")
        self.pending -= count
        self._advance()

    def expect(self, transactions: int) -> None:
        """Expect this many bytes more in the current phase."""
        self.transactions += transactions
        self.expected_bytes += transactions

    def complete(self, transactions: int) -> None:
        """Count bytes that have been copied."""
        self.transactions -= transactions
        self.completed_bytes += transactions
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.pending = self.count
            self.phase += 1

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity has completed: the current one has the other."""
        return self.phase % 2 != parity

    @property
    def balanced(self) -> bool:
        """Whether no phase is under way."""
        return self.pending == self.count and self.transactions == 0

    def __str__(self) -> str:
        return (
            f"barrier in phase {self.phase} with {self.pending} of {self.count} arrivals and {self.transactions} "
            "bytes pending"
        )


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor, outermost dimension first: element bytes, sizes, strides in bytes, box, swizzle in bytes."""

    buffer: Bytes
    offset: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def __post_init__(self) -> None:
        inner = self.box[-1] * self.itemsize
        if not (len(self.sizes) == len(self.strides) == len(self.box) <= 5):
            raise PtxError(f"a tensor map has {len(self.sizes)} sizes, {len(self.box)} box sizes")
        if any(b > 256 or b < 1 for b in self.box) or inner % 16 or (self.swizzle > 16 and inner > self.swizzle):
            raise PtxError(f"a tensor map cannot have the box {self.box} of {self.itemsize} bytes, {self.swizzle=}")
        if any(stride % 16 for stride in self.strides[:-1]) or self.offset % 16:
            raise PtxError(f"a tensor map cannot have the strides {self.strides}: they must be multiples of 16 bytes")

    @property
    def box_bytes(self) -> int:
        """Bytes of a box in shared memory; what lies outside the tensor counts."""
        return int(np.prod(self.box)) * self.itemsize

    def places(self, coordinates: Sequence[int], box: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Byte offset in the buffer of each 16-byte chunk of a box, and a mask of bytes inside the tensor.

        `coordinates` are innermost first, as an instruction has them.
        """
        box = self.box if box is None else box
        offsets, inside = np.zeros((1,) * len(box), np.int64), np.ones((1,) * len(box), bool)
        for axis, (start, extent, size, stride) in enumerate(
            zip(reversed(coordinates), box, self.sizes, self.strides, strict=True)
        ):
            shape = [1] * len(box)
            shape[axis] = extent
            index = np.arange(start, start + extent).reshape(shape)
            offsets = offsets + index * stride
            inside = inside & (index >= 0) & (index < size)
        return offsets + self.offset, np.broadcast_to(inside, offsets.shape)

    def load(self, coordinates: Sequence[int]) -> np.ndarray:
        """A box as bytes in shared memory's order before the swizzle; zero outside the tensor."""
        offsets, inside = self.places(coordinates)
        return self._elements(offsets, inside).reshape(-1).view(np.uint8)

    def _elements(self, offsets: np.ndarray, inside: np.ndarray) -> np.ndarray:
        view = self.buffer.views[self.itemsize]
        shift = self.itemsize.bit_length() - 1
        values = view[np.where(inside, offsets >> shift, 0)]
        return np.where(inside, values, 0).astype(view.dtype)

    def store(self, coordinates: Sequence[int], data: np.ndarray) -> None:
        """Write a box; what lies outside the tensor is dropped."""
        offsets, inside = self.places(coordinates)
        view = self.buffer.views[self.itemsize]
        values = data.view(view.dtype).reshape(offsets.shape)
        view[(offsets >> (self.itemsize.bit_length() - 1))[inside]] = values[inside]


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Byte addresses permuted as the copy engine and the tensor cores do: bits 4.. are mixed with bits 7.. ."""
    mask = {128: 7, 64: 3, 32: 1}.get(swizzle, 0)
    return addresses ^ (((addresses >> 7) & mask) << 4)
