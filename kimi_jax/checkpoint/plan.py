"""What is read for which device: a pure step over headers and declarations, before a byte of a tensor is touched.

orbax's SafetensorsLayout reads byte ranges for sharded arrays too, but one array for each tensor: a stack of experts,
384 tensors in one array, would exist twice in memory, and it reports neither extra nor mistyped tensors.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors import (
    DTYPE_BYTES,
    INDEX_NAME,
    NUMPY_DTYPES,
    Tensor,
    collector_paused,
    describe,
    read_index,
)
from kimi_jax.parallel.placement import EMPTY, SlotExperts, slots_of_layer
from kimi_jax.parameters import Declaration, Rules, declarations
from kimi_jax.quantization import CODES_PER_WORD

if TYPE_CHECKING:
    from jaxlib._jax import Device

SKIPPED_FAMILIES = ("vision_tower.", "mm_projector.")
"""Keys of K2.6's checkpoint that the language model does not use."""
FLOATS = ("BF16", "F16", "F32")
SMALLEST_GAP = 4096
"""Unneeded bytes between two needed runs below which both are read at once: a page, which the disk reads anyway."""


class Region(NamedTuple):
    """Rows and columns of a matrix; a vector is a matrix of one column."""

    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def size(self) -> int:
        """Elements."""
        return (self.row_end - self.row) * (self.column_end - self.column)


@dataclasses.dataclass(frozen=True)
class Block:
    """One distinct part of an array, and the devices that hold it (more than one where it is replicated)."""

    slot: int
    slot_end: int
    """Expert slots it covers; 0 and 1 where the array is not stacked."""
    region: Region
    """Of the tensor that each slot comes from."""
    shape: tuple[int, ...]
    """Of the array's part on a device."""
    devices: "tuple[Device, ...]"


class Place(NamedTuple):
    """Where a tensor's region goes: which block, which of the block's slots."""

    block: int
    slot: int
    region: Region


class Read(NamedTuple):
    """One region of a tensor, read once, and the places it fills."""

    tensor: Tensor
    region: Region
    places: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        return self.region.size * NUMPY_DTYPES[self.tensor.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class ArrayPlan:
    """One array of the parameters: its blocks and the tensors it is made of."""

    declaration: Declaration
    sharding: NamedSharding
    blocks: tuple[Block, ...]
    tensors: tuple[Tensor, ...]
    """One for each expert; a single one where the array is not stacked."""
    weight_shapes: tuple[Tensor, ...]
    """For packed weights, the tensors that state each expert's unpacked shape."""
    slots: tuple[int, ...]
    """Position in `tensors` of what each slot holds, `EMPTY` where it stays zero."""

    @property
    def width(self) -> int:
        """Columns of a tensor seen as a matrix."""
        return math.prod(_tensor_shape(self.declaration)[1:])

    def local(self, devices: "frozenset[Device]") -> "ArrayPlan":
        """The part that these devices hold."""
        held = ((block, tuple(d for d in block.devices if d in devices)) for block in self.blocks)
        return dataclasses.replace(
            self, blocks=tuple(dataclasses.replace(block, devices=some) for block, some in held if some)
        )

    def _schedule(self) -> tuple[tuple[int, Region, tuple[Place, ...]], ...]:
        cells = tuple((block.slot, block.slot_end, block.region) for block in self.blocks)
        return _schedule(cells, self.slots, self.width, NUMPY_DTYPES[self.tensors[0].dtype].itemsize)

    def reads(self) -> Iterator[Read]:
        """Reads that fill all blocks, no byte of a tensor in two of them."""
        return (Read(self.tensors[expert], region, places) for expert, region, places in self._schedule())

    def shape_tensors(self) -> list[Tensor]:
        """The `weight_shape` tensors of the experts in the blocks."""
        return [self.weight_shapes[expert] for expert in self._experts()] if self.weight_shapes else []

    def read_bytes(self) -> int:
        """Bytes of `reads` and `shape_tensors`."""
        elements = sum(region.size for _, region, _ in self._schedule())
        body = elements * NUMPY_DTYPES[self.tensors[0].dtype].itemsize
        shapes = self.shape_tensors()
        return body + sum(2 * DTYPE_BYTES[tensor.dtype] for tensor in shapes)

    def position(self) -> tuple[str, int]:
        """File and byte of the first expert that is read: orders arrays as they lie on disk."""
        first = self.tensors[min(self._experts(), default=0)]
        return first.file.name, first.start

    def _experts(self) -> Sequence[int]:
        return sorted({expert for expert, _, _ in self._schedule()})

    @property
    def nbytes(self) -> int:
        """Of the distinct blocks."""
        return sum(math.prod(block.shape) for block in self.blocks) * self.declaration.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Plan:
    """All arrays of a model on a mesh, and which process each device belongs to."""

    arrays: tuple[ArrayPlan, ...]
    process_of: "Mapping[Device, int]"
    skipped: tuple[Tensor, ...]
    """Tensors of the families that were skipped."""

    @property
    def processes(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.process_of.values())))

    def local(self, process: int) -> tuple[ArrayPlan, ...]:
        """What one process reads: its blocks, in the order of the files."""
        devices = frozenset(d for d, owner in self.process_of.items() if owner == process)
        arrays = [array.local(devices) for array in self.arrays]
        return tuple(sorted((a for a in arrays if a.blocks), key=ArrayPlan.position))

    def device_bytes(self) -> "dict[Device, int]":
        """Bytes of parameters on each device."""
        total = dict.fromkeys(self.process_of, 0)
        for array in self.arrays:
            for block in array.blocks:
                for device in block.devices:
                    total[device] += math.prod(block.shape) * array.declaration.dtype.itemsize
        return total

    def read_bytes(self, process: int) -> int:
        """Bytes a process reads from the shards' bodies, `weight_shape` tensors included."""
        return sum(array.read_bytes() for array in self.local(process))

    def largest(self, process: int) -> int:
        """Bytes of the largest array's local part; the loader holds two such in flight at most."""
        return max((array.nbytes for array in self.local(process)), default=0)


@collector_paused()
def plan(
    checkpoint: Mapping[str, Tensor],
    module: nnx.Module,
    config_prefix: str,
    mesh: Mesh,
    rules: Rules,
    *,
    dtype: DTypeLike,
    num_experts: int,
    slot_experts: SlotExperts | None = None,
    skip: Sequence[str] = SKIPPED_FAMILIES,
    process_of: "Mapping[Device, int] | None" = None,
) -> Plan:
    """Matches a checkpoint's tensors with a module's declarations on a mesh.

    Args:
      checkpoint: tensors by name, from `open_checkpoint`.
      module: declares the arrays.
      config_prefix: begins every key (`ModelConfig.key_prefix`).
      mesh, rules: where the arrays lie.
      dtype: type of the weights that have none of their own.
      num_experts: experts of a layer in the checkpoint.
      slot_experts: expert in each slot, `EMPTY` for none, of all layers alike or by layer; by default slot i holds
        expert i and the rest is empty.
      skip: beginnings of the keys that are not used.
      process_of: process of each device; by default its own.

    Raises:
      CheckpointError: tensors that are missing, extra, misshapen or mistyped, each named with its file; a mesh that
        does not divide an array; slots that leave an expert out.
    """
    used: set[str] = set()
    problems: list[str] = []
    folder = next(iter(checkpoint.values())).file.parent if checkpoint else "checkpoint"

    def find(key: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> Tensor | None:
        used.add(key)
        tensor = checkpoint.get(key)
        if tensor is None:
            problems.append(f"{folder}: {key}: missing")
        elif tensor.shape != shape:
            problems.append(f"{tensor.file}: {key}: has shape {list(tensor.shape)}, expected {list(shape)}")
        elif tensor.dtype not in dtypes:
            problems.append(f"{tensor.file}: {key}: is {tensor.dtype}, expected {' or '.join(dtypes)}")
        return tensor

    def find_all(keys: Sequence[str], shape: tuple[int, ...], dtypes: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(tensor for key in keys if (tensor := find(key, shape, dtypes)))

    arrays = []
    for declaration in declarations(module, dtype):
        experts = range(num_experts) if declaration.stacked else (None,)
        keys = [config_prefix + declaration.key(expert) for expert in experts]
        dtypes = [n for n, kind in NUMPY_DTYPES.items() if kind == declaration.dtype] if declaration.fixed else FLOATS
        tensors = find_all(keys, _tensor_shape(declaration), dtypes)
        shapes: tuple[Tensor, ...] = ()
        if declaration.stacked and declaration.path[-1] == "packed":
            shapes = find_all([key.removesuffix("_packed") + "_shape" for key in keys], (2,), ("I32", "I64"))
        slots = _slots(declaration, num_experts, slot_experts) if declaration.stacked else (0,)
        sharding, blocks = lay_out(declaration, mesh, rules, keys[0])
        arrays.append(ArrayPlan(declaration, sharding, blocks, tensors, shapes, slots))

    skipped = []
    for key, tensor in checkpoint.items():
        if key.startswith(tuple(skip)):
            skipped.append(tensor)
        elif key not in used:
            problems.append(f"{tensor.file}: {key}: not part of the model")
    if problems:
        raise CheckpointError(describe(problems))
    owners = {d: d.process_index for d in mesh.devices.flat} if process_of is None else process_of
    return Plan(tuple(arrays), owners, tuple(skipped))


def declared_tensors(
    directory: Path, module: nnx.Module, config_prefix: str, *, dtype: DTypeLike, num_experts: int
) -> tuple[dict[str, Tensor], int]:
    """The tensors an index names, with the shapes and types that a module declares, and the bytes of all of them.

    For a plan before the shards are there. Tensors that the module does not declare have no bytes here; those of all
    are the index's own figure, or the declared ones' where it has none. Arguments as for `plan`.

    Raises:
      CheckpointError: no index, or a broken one.
    """
    weight_map, total = read_index(directory / INDEX_NAME)
    tensors = {key: Tensor(key, directory / name, "U8", (0,), 0) for key, name in weight_map.items()}
    names = {kind: name for name, kind in NUMPY_DTYPES.items()}
    for declaration in declarations(module, dtype):
        for expert in range(num_experts) if declaration.stacked else (None,):
            key = config_prefix + declaration.key(expert)
            known = {key: (names[declaration.dtype], _tensor_shape(declaration))}
            if declaration.path[-1] == "packed":
                known[key.removesuffix("_packed") + "_shape"] = ("I32", (2,))
            for each, (kind, shape) in known.items():
                if each in tensors:
                    tensors[each] = tensors[each]._replace(dtype=kind, shape=shape)
    return tensors, sum(tensor.nbytes for tensor in tensors.values()) if total is None else total


def lay_out(declaration: Declaration, mesh: Mesh, rules: Rules, key: str) -> tuple[NamedSharding, tuple[Block, ...]]:
    """How an array lies on a mesh, and its distinct blocks.

    Raises:
      CheckpointError: with `key` where it cannot.
    """
    sharding = NamedSharding(mesh, declaration.spec(rules))
    try:
        return sharding, _blocks(declaration.shape, declaration.stacked, sharding)
    except ValueError as error:
        raise CheckpointError(f"{key}: cannot lie on this mesh: {error}") from None


def split_processes(mesh: Mesh, processes: int) -> "dict[Device, int]":
    """A process for each device of a mesh: equal blocks in mesh order, to plan for machines that are not there.

    Raises:
      ValueError: the devices cannot be shared equally.
    """
    if processes < 1 or mesh.size % processes:
        raise ValueError(f"{mesh.size} devices cannot be shared equally by {processes} processes")
    return {device: number * processes // mesh.size for number, device in enumerate(mesh.devices.flat)}


def weight_shape(array: ArrayPlan) -> tuple[int, int]:
    """What the `weight_shape` tensors of a packed array must say: [out, in]."""
    _, out, words = array.declaration.shape
    return out, words * CODES_PER_WORD


def _tensor_shape(declaration: Declaration) -> tuple[int, ...]:
    return declaration.shape[1:] if declaration.stacked else declaration.shape


def _slots(declaration: Declaration, num_experts: int, slot_experts: SlotExperts | None) -> tuple[int, ...]:
    count, where = declaration.shape[0], ".".join(map(str, declaration.path))
    if slot_experts is None:
        if count < num_experts:
            raise CheckpointError(f"{where}: {count} slots cannot hold the {num_experts} experts of the checkpoint")
        return (*range(num_experts), *[EMPTY] * (count - num_experts))
    slot_experts = slots_of_layer(slot_experts, declaration.path)
    if len(slot_experts) != count:
        raise CheckpointError(f"{where}: {count} slots, but experts were given for {len(slot_experts)}")
    absent = set(range(num_experts)) - set(slot_experts)
    unknown = set(slot_experts) - set(range(num_experts)) - {EMPTY}
    if absent or unknown:
        raise CheckpointError(
            f"{where}: slots hold unknown experts {sorted(unknown)} and leave out {sorted(absent)} of {num_experts}"
        )
    return tuple(slot_experts)


@functools.lru_cache(maxsize=1024)
def _blocks(shape: tuple[int, ...], stacked: bool, sharding: NamedSharding) -> tuple[Block, ...]:
    holders: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    blocks = []
    for bounds, devices in holders.items():
        (slot, slot_end), *inner = bounds if stacked else ((0, 1), *bounds)
        sizes = shape[1:] if stacked else shape
        if inner[2:] != [(0, size) for size in sizes[2:]]:
            raise ValueError(f"only the first two dimensions of a tensor {list(sizes)} can be sharded")
        depth = math.prod(sizes[2:])
        columns = (inner[1][0] * depth, inner[1][1] * depth) if len(inner) > 1 else (0, 1)
        part = tuple(stop - start for start, stop in bounds)
        blocks.append(Block(slot, slot_end, Region(*inner[0], *columns), part, tuple(devices)))
    return tuple(blocks)


# Layers repeat, so that the schedules of 61 layers are those of two.
@functools.lru_cache(maxsize=1024)
def _schedule(
    cells: tuple[tuple[int, int, Region], ...], slots: tuple[int, ...], width: int, itemsize: int
) -> tuple[tuple[int, Region, tuple[Place, ...]], ...]:
    """(Expert, region to read, places it fills) for cells of (slot, slot end, region): each expert's bytes once."""
    places: dict[int, list[Place]] = {}
    for number, (first, end, region) in enumerate(cells):
        for slot in range(first, end):
            if slots[slot] != EMPTY:
                places.setdefault(slots[slot], []).append(Place(number, slot - first, region))
    return tuple(
        (expert, region, tuple(wanted[m] for m in members))
        for expert, wanted in sorted(places.items())
        for region, members in _merge(tuple(place.region for place in wanted), width, itemsize)
    )


@functools.lru_cache(maxsize=4096)
def _merge(wanted: tuple[Region, ...], width: int, itemsize: int) -> tuple[tuple[Region, tuple[int, ...]], ...]:
    """Regions to read, each with the positions of the wanted ones it covers.

    Wanted regions are cells of a grid (equal or disjoint). In each band of rows, columns with less than a page between
    them are joined; whole rows lie together in the file.
    """
    gap = SMALLEST_GAP // itemsize
    result = []
    for row, row_end in sorted({(r.row, r.row_end) for r in wanted}):
        spans: list[list[int]] = []
        for column, column_end in sorted({(r.column, r.column_end) for r in wanted if r.row == row}):
            if spans and column - spans[-1][1] < gap:
                spans[-1][1] = column_end
            else:
                spans.append([column, column_end])
        if len(spans) == 1 and width - (spans[0][1] - spans[0][0]) < gap:
            spans = [[0, width]]
        for column, column_end in spans:
            members = tuple(
                n for n, r in enumerate(wanted) if r.row == row and column <= r.column and r.column_end <= column_end
            )
            result.append((Region(row, row_end, column, column_end), members))
    return tuple(result)
