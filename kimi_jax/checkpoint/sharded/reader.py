"""Reading a sharded checkpoint onto any mesh and any placement, chunk by chunk, each checked against its checksum."""

import concurrent.futures
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax import parameters as declared
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.huggingface import Counter, Progress, reading_pool, require_finite
from kimi_jax.checkpoint.plan import Block, lay_out
from kimi_jax.checkpoint.safetensors import describe
from kimi_jax.checkpoint.sharded.manifest import (
    Stored,
    array_name,
    chunk_key,
    open_array,
    parts,
    read_json,
    read_manifest,
)
from kimi_jax.parallel.host_arrays import host_buffer
from kimi_jax.parallel.placement import EMPTY, SlotExperts, slots_of_layer
from kimi_jax.parameters import Declaration, Parameters, Rules

if TYPE_CHECKING:
    from jaxlib._jax import Device


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
        """Matches all arrays of a model with those stored.

        Raises:
          CheckpointError: naming each that does not fit.
        """
        problems, wanted = [], set()
        for declaration in declarations:
            name = array_name(declaration.path)
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
        key = array_name(declaration.path)
        _, blocks = lay_out(declaration, self._mesh, self._rules, key)
        here = jax.process_index()
        held = ((block, [d for d in block.devices if d.process_index == here]) for block in blocks)
        return [(block, devices) for block, devices in held if devices]

    def _read(
        self, declaration: Declaration, slot_experts: SlotExperts, pool: concurrent.futures.Executor
    ) -> jax.Array:
        name = array_name(declaration.path)
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
        store = open_array((self.directory / "parts" / stored.part).absolute(), name)
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
        if zlib.crc32(values.view(np.uint8)) != self._checksums.get(name, {}).get(chunk_key(chunk)):
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
