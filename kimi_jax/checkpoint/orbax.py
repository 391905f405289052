"""Sharded checkpoints through orbax: one orbax checkpoint a layer, checksums and a manifest that is written last.

    DIRECTORY/
      manifest.json           format version, slots, shapes and chunks of every array, size of every file
      checksums-P.json        CRC-32 of every chunk that process P wrote
      parts/layer-00003/…     orbax checkpoints: one flat dict {"model.layers.3.….packed": array} each
      parts/rest/…            embedding, norm, head
      config.json, tiktoken.model, …

orbax writes; reading goes through its storage layer (tensorstore) directly, because a stack of expert slots is read
onto other slots than it was written from, expert by expert, and each chunk is checked against its checksum.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax import parameters as declared
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.huggingface import Counter, Progress, reading_pool, require_finite
from kimi_jax.checkpoint.plan import Block, host_buffer, lay_out
from kimi_jax.checkpoint.safetensors import describe
from kimi_jax.checkpoint.writer import barrier, leaf, prepare, publish
from kimi_jax.parallel.placement import EMPTY, SlotExperts, slots_of_layer
from kimi_jax.parameters import Declaration, Parameters, Rules

if TYPE_CHECKING:
    from jaxlib._jax import Device

FORMAT, VERSION = "kimi_jax.orbax", 1
MANIFEST_NAME = "manifest.json"
CHUNK_BYTES = 8 << 20
"""Upper bound of a chunk, the unit of reading; a chunk of a stack is one expert's matrix (7.3 MB in K2.6)."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """One array of a sharded checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    part: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a sharded checkpoint holds."""

    arrays: Mapping[str, Stored]
    slot_experts: SlotExperts
    """Expert in each slot of the stored stacks, EMPTY for none, of all layers alike or by layer: the placement travels
    with the weights."""
    dtype: str
    """Type of the weights that have none of their own."""
    files: Mapping[str, int]
    """Bytes of each file below `parts`."""


def save(
    directory: str | Path,
    parameters: Parameters,
    module: nnx.Module,
    *,
    dtype: DTypeLike,
    slot_experts: SlotExperts,
    extra_files: Iterable[Path] = (),
) -> None:
    """Writes parameters as a sharded checkpoint; called by every process, which writes its own bytes.

    Args:
      directory: to be created; an existing one must be empty.
      dtype: that the parameters were declared with.
      slot_experts: expert in each slot of the stacks, of all layers alike or by layer.
      extra_files: copied beside (config.json, tokenizer).

    Raises:
      CheckpointError: the folder is in use. A failed call leaves `DIRECTORY.incomplete`.
    """
    with Writer(directory, module, dtype=dtype, slot_experts=slot_experts, extra_files=extra_files) as writer:
        for part, declarations in parts(module, dtype).items():
            writer.add(part, {d.path: leaf(parameters, d.path) for d in declarations})


def parts(module: nnx.Module, dtype: DTypeLike) -> dict[str, list[Declaration]]:
    """The arrays of a module by the part they are stored in: one for each layer, one for the rest."""
    grouped: dict[str, list[Declaration]] = defaultdict(list)
    for declaration in declared.declarations(module, dtype):
        layer = next((name for name in declaration.path if isinstance(name, int)), None)
        grouped["rest" if layer is None else f"layer-{layer:05d}"].append(declaration)
    return dict(sorted(grouped.items()))


class Writer:
    """A sharded checkpoint being written part by part, for parameters that are never in memory all at once.

    Arguments as for `save`. All parts are given to `add` within the `with` block; leaving it without an error writes
    the manifest and completes the folder.
    """

    def __init__(
        self,
        directory: str | Path,
        module: nnx.Module,
        *,
        dtype: DTypeLike,
        slot_experts: SlotExperts,
        extra_files: Iterable[Path] = (),
    ):
        self._directory, self._extra_files = Path(directory), tuple(extra_files)
        self._missing = parts(module, dtype)
        self._dtype, self._slot_experts = np.dtype(dtype).name, _same_or_by_layer(slot_experts)
        self._arrays: dict[str, Stored] = {}
        self._checksums: dict[str, dict[str, int]] = {}

    def __enter__(self) -> Self:
        self._partial = prepare(self._directory, self._extra_files)
        return self

    def add(self, part: str, arrays: Mapping[declared.Path, jax.Array]) -> None:
        """Writes one part. Host memory holds it once more while orbax writes it."""
        declarations = self._missing.pop(part)
        tree, arguments = {}, {}
        for declaration in declarations:
            array, name = arrays[declaration.path], _name(declaration.path)
            if array.shape != declaration.shape or array.dtype != declaration.dtype:
                raise CheckpointError(
                    f"{name}: is {array.dtype}{list(array.shape)}, "
                    f"expected {declaration.dtype}{list(declaration.shape)}"
                )
            tree[name] = array
            axes = (0,) if declaration.stacked else ()
            arguments[name] = ocp.SaveArgs(shard_axes=axes, chunk_byte_size=CHUNK_BYTES)
        folder = (self._partial / "parts" / part).absolute()
        # Sharing the writing among replicas would slice arrays on the devices, one compiled program for each shape.
        registry = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
        )
        # INT4 words do not compress; zstd would only cost time.
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_zarr3=True, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=arguments))
        for name, array in tree.items():
            chunk = tuple(_open(folder, name).chunk_layout.read_chunk.shape)
            self._arrays[name] = Stored(array.shape, np.dtype(array.dtype).name, chunk, part)
            self._checksums[name] = dict(_shard_checksums(array, chunk))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._missing:
            raise CheckpointError(f"{self._partial}: parts {sorted(self._missing)} were never written")
        _write_json(self._partial / f"checksums-{jax.process_index()}.json", self._checksums)
        barrier("checkpoint written")
        if jax.process_index() == 0:
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "dtype": self._dtype,
                "slot_experts": self._slot_experts,
                "arrays": {name: dataclasses.asdict(stored) for name, stored in self._arrays.items()},
                "files": _sizes(self._partial),
            }
            _write_json(self._partial / MANIFEST_NAME, manifest)
        publish(self._partial, self._directory)


def _same_or_by_layer(slot_experts: Any) -> SlotExperts:
    """As a manifest keeps it: one tuple where all layers are alike, else one by layer (JSON has names for numbers)."""
    if not isinstance(slot_experts, Mapping):
        return tuple(slot_experts)
    layers = {int(layer): tuple(slots) for layer, slots in slot_experts.items()}
    return next(iter(layers.values())) if len(set(layers.values())) == 1 else layers


def is_sharded(directory: str | Path) -> bool:
    """Whether a folder is, or claims to be, a sharded checkpoint of this project."""
    return os.path.lexists(Path(directory) / MANIFEST_NAME)


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest, after comparing every file's presence and size with it.

    Raises:
      CheckpointError: no manifest (half-written, or another format), another format version, files missing or cut.
    """
    directory = Path(directory)
    path = directory / MANIFEST_NAME
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: missing; a half-written checkpoint, or none of this format; convert it again")
    raw = read_json(path)
    if raw.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format is not {FORMAT!r}")
    if raw.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format version {raw.get('version')!r}, this program reads {VERSION}; "
            "convert the original checkpoint again"
        )
    try:
        arrays = {
            str(name): Stored(tuple(s["shape"]), str(s["dtype"]), tuple(s["chunk"]), str(s["part"]))
            for name, s in raw["arrays"].items()
        }
        slots = _same_or_by_layer(raw["slot_experts"])
        files = {str(name): int(size) for name, size in raw["files"].items()}
        manifest = Manifest(arrays, slots, str(raw["dtype"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: broken manifest: {error!r}") from None
    found = _sizes(directory)
    problems = [
        f"{directory / name}: {'missing' if name not in found else f'{found[name]:,} bytes'}, expected {size:,} bytes"
        for name, size in manifest.files.items()
        if found.get(name) != size
    ]
    if problems:
        raise CheckpointError(describe(problems))
    return manifest


def restore(
    directory: str | Path,
    module: nnx.Module,
    mesh: Mesh,
    rules: Rules,
    *,
    dtype: DTypeLike,
    slot_experts: SlotExperts,
    progress: Progress | None = None,
    workers: int = 8,
) -> Parameters:
    """Reads a sharded checkpoint onto any mesh and any placement; this process reads its devices' chunks only.

    Raises:
      CheckpointError: as `read_manifest`; arrays missing, extra, misshapen or mistyped; an expert that no stored slot
        holds; a chunk whose bytes are not those written.
    """
    reader = Reader(directory, mesh, rules, workers)
    grouped = parts(module, dtype)
    reader.check(itertools.chain.from_iterable(grouped.values()))
    count = Counter(progress, sum(map(reader.local_bytes, itertools.chain.from_iterable(grouped.values()))))
    leaves: dict[declared.Path, jax.Array] = {}
    for declarations in grouped.values():
        leaves |= reader.read(declarations, slot_experts, count)
    return declared.from_leaves(module, leaves)


class Reader:
    """A sharded checkpoint opened for one mesh, read array by array."""

    def __init__(self, directory: str | Path, mesh: Mesh, rules: Rules, workers: int = 8):
        self.directory = Path(directory)
        self.manifest = read_manifest(directory)
        self._mesh, self._rules, self._workers = mesh, rules, workers
        self._checksums: dict[str, dict[str, int]] = {}
        for path in sorted(self.directory.glob("checksums-*.json")):
            for name, chunks in read_json(path).items():
                self._checksums.setdefault(name, {}).update(chunks)

    def check(self, declarations: Iterable[Declaration]) -> None:
        """Matches all arrays of a model with those stored. Raises CheckpointError naming each that does not fit."""
        problems, wanted = [], set()
        for declaration in declarations:
            name = _name(declaration.path)
            wanted.add(name)
            stored = self.manifest.arrays.get(name)
            if stored is None:
                problems.append(f"{self.directory}: {name}: missing")
                continue
            expected = declaration.shape
            if declaration.stacked:
                expected = (len(slots_of_layer(self.manifest.slot_experts, declaration.path)), *expected[1:])
            if stored.shape != expected:
                problems.append(f"{self.directory}: {name}: has shape {list(stored.shape)}, expected {list(expected)}")
            kind = np.dtype(stored.dtype)
            fits = kind == declaration.dtype if declaration.fixed else jnp.issubdtype(kind, jnp.floating)
            if not fits:
                problems.append(f"{self.directory}: {name}: is {stored.dtype}, expected {declaration.dtype}")
        problems += [
            f"{self.directory}: {name}: not part of the model" for name in self.manifest.arrays.keys() - wanted
        ]
        if problems:
            raise CheckpointError(describe(problems))

    def local_bytes(self, declaration: Declaration) -> int:
        """Bytes of this process's distinct blocks of an array."""
        return sum(math.prod(block.shape) for block, _ in self._blocks(declaration)) * declaration.dtype.itemsize

    def read(
        self, declarations: Iterable[Declaration], slot_experts: SlotExperts, count: Counter
    ) -> dict[declared.Path, jax.Array]:
        """Some arrays on the mesh. Host memory holds one array's local part and a chunk for each thread."""
        leaves = {}
        with reading_pool(self._workers) as pool:
            for declaration in declarations:
                leaves[declaration.path] = self._read(declaration, slot_experts, pool)
                count.add(self.local_bytes(declaration))
        return leaves

    def _blocks(self, declaration: Declaration) -> "list[tuple[Block, list[Device]]]":
        key = _name(declaration.path)
        _, blocks = lay_out(declaration, self._mesh, self._rules, key)
        here = jax.process_index()
        held = ((block, [d for d in block.devices if d.process_index == here]) for block in blocks)
        return [(block, devices) for block, devices in held if devices]

    def _read(
        self, declaration: Declaration, slot_experts: SlotExperts, pool: concurrent.futures.Executor
    ) -> jax.Array:
        name = _name(declaration.path)
        stored = self.manifest.arrays[name]
        wanted: Sequence[int] = ()
        source: dict[int, int] = {}
        if declaration.stacked:
            wanted = slots_of_layer(slot_experts, declaration.path)
            held = slots_of_layer(self.manifest.slot_experts, declaration.path)
            source = {expert: slot for slot, expert in reversed([*enumerate(held)])}
        hosts: list[tuple[np.ndarray, list[Device]]] = []
        places: dict[tuple[int, ...], list[tuple[np.ndarray, tuple[slice, ...]]]] = defaultdict(list)
        for block, devices in self._blocks(declaration):
            host = host_buffer(block.shape, declaration.dtype, zero=declaration.stacked)
            hosts.append((host, devices))
            inner = [block.region[:2], block.region[2:]][: len(declaration.shape) - declaration.stacked]
            if not declaration.stacked:
                _place(places, stored.chunk, inner, host)
                continue
            for slot in range(block.slot, block.slot_end):
                expert = wanted[slot]
                if expert == EMPTY:
                    continue
                if expert not in source:
                    raise CheckpointError(f"{self.directory}: {name}: no stored slot holds expert {expert}")
                at = source[expert]
                _place(places, stored.chunk, [(at, at + 1), *inner], host[slot - block.slot][None])
        store = _open((self.directory / "parts" / stored.part).absolute(), name)
        tasks = [pool.submit(self._fill, store, name, stored, chunk, targets) for chunk, targets in places.items()]
        for task in tasks:
            task.result()
        sharding, _ = lay_out(declaration, self._mesh, self._rules, name)
        shards = [jax.device_put(host, device) for host, devices in hosts for device in devices]
        return jax.make_array_from_single_device_arrays(declaration.shape, sharding, shards).block_until_ready()

    def _fill(
        self,
        store: Any,
        name: str,
        stored: Stored,
        chunk: tuple[int, ...],
        targets: Sequence[tuple[np.ndarray, tuple[slice, ...]]],
    ) -> None:
        """Reads one chunk, checks it and copies it to its places."""
        where = f"{self.directory / 'parts' / stored.part}: {name}: chunk {list(chunk)}"
        origin = [number * size for number, size in zip(chunk, stored.chunk, strict=True)]
        bounds = [
            slice(at, min(at + size, end)) for at, size, end in zip(origin, stored.chunk, stored.shape, strict=True)
        ]
        try:
            values = np.ascontiguousarray(store[tuple(bounds)].read().result())
        except (ValueError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{where}: cannot be read: {error}") from None
        if zlib.crc32(values.view(np.uint8)) != self._checksums.get(name, {}).get(_chunk_key(chunk)):
            raise CheckpointError(f"{where}: its bytes are not those that were written (CRC-32 differs)")
        require_finite(f"{where}", values)
        for target, index in targets:
            local = tuple(slice(s.start - at, s.stop - at) for s, at in zip(index, origin, strict=True))
            target[...] = values[local]


def _place(
    places: dict[tuple[int, ...], list[tuple[np.ndarray, tuple[slice, ...]]]],
    chunk: tuple[int, ...],
    bounds: Sequence[tuple[int, ...]],
    target: np.ndarray,
) -> None:
    """Notes, for each chunk that a rectangle of an array touches, which part of it goes to which part of `target`."""
    grids = [range(start // size, -(-end // size)) for (start, end), size in zip(bounds, chunk, strict=True)]
    for number in itertools.product(*grids):
        index = tuple(
            slice(max(start, n * size), min(end, (n + 1) * size))
            for n, size, (start, end) in zip(number, chunk, bounds, strict=True)
        )
        inside = tuple(slice(s.start - start, s.stop - start) for s, (start, _) in zip(index, bounds, strict=True))
        places[number].append((target[inside], index))


def _shard_checksums(array: jax.Array, chunk: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """(Chunk, CRC-32) of this process's shards; chunks divide shards, of which the first replica counts."""
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        data = np.asarray(shard.data)
        starts = [s.indices(size)[0] for s, size in zip(shard.index, array.shape, strict=True)]
        for corner in itertools.product(*(range(0, n, c) for n, c in zip(data.shape, chunk, strict=True))):
            part = data[tuple(slice(at, at + size) for at, size in zip(corner, chunk, strict=True))]
            number = tuple((start + at) // size for start, at, size in zip(starts, corner, chunk, strict=True))
            yield _chunk_key(number), zlib.crc32(np.ascontiguousarray(part).view(np.uint8))


def _open(folder: Path, name: str) -> Any:
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    try:
        return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True, open=True).result()
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder}: {name}: cannot be opened: {error}") from None


def _name(path: declared.Path) -> str:
    return ".".join(map(str, path))


def _chunk_key(number: tuple[int, ...]) -> str:
    return ",".join(map(str, number))


def _sizes(directory: Path) -> dict[str, int]:
    files = (path for path in (directory / "parts").rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in sorted(files)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def _write_json(path: Path, content: Any) -> None:
    with open(path, "w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def copyable_files(directory: Path) -> list[Path]:
    """What belongs to a checkpoint besides its weights: configuration, tokenizer, licence."""
    weights = (".safetensors", ".safetensors.index.json")
    ours = (MANIFEST_NAME, "checksums-")
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.endswith(weights) and not path.name.startswith(ours)
    ]
