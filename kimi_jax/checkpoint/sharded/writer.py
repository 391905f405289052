"""Writing a sharded checkpoint: orbax a part, then this process's checksums, then the manifest."""

import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.typing import DTypeLike

from kimi_jax import parameters as declared
from kimi_jax import text_files
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.safetensors import SINGLE_NAME, Tensor
from kimi_jax.checkpoint.sharded.manifest import (
    FORMAT,
    MANIFEST_NAME,
    VERSION,
    VISION_FOLDER,
    Stored,
    array_name,
    chunk_key,
    open_array,
    part_sizes,
    parts,
    same_or_by_layer,
)
from kimi_jax.checkpoint.writer import CONFIG_NAME, barrier, copy_tensors, leaf, prepare, publish
from kimi_jax.parallel.placement import SlotExperts
from kimi_jax.parameters import Parameters

CHUNK_BYTES = 8 << 20
"""Upper bound of a chunk, the unit of reading; a chunk of a stack is one expert's matrix (7.3 MB in K2.6)."""


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


class Writer:
    """A sharded checkpoint being written part by part, for parameters that are never in memory all at once.

    Arguments as for `save`. All parts are given to `add` within the `with` block; leaving it without an error writes
    the manifest and completes the folder. `vision` are tower and projector of another checkpoint, copied as they are.
    """

    def __init__(
        self,
        directory: str | Path,
        module: nnx.Module,
        *,
        dtype: DTypeLike,
        slot_experts: SlotExperts,
        extra_files: Iterable[Path] = (),
        vision: Sequence[Tensor] = (),
    ):
        self._directory, self._extra_files, self._vision = Path(directory), tuple(extra_files), tuple(vision)
        self._missing = parts(module, dtype)
        self._dtype, self._slot_experts = np.dtype(dtype).name, same_or_by_layer(slot_experts)
        self._arrays: dict[str, Stored] = {}
        self._checksums: dict[str, dict[str, int]] = {}

    def __enter__(self) -> Self:
        if jax.process_index() == 0:
            self._config = {path.name: path.read_text() for path in self._extra_files if path.name == CONFIG_NAME}
        self._partial = prepare(self._directory, self._extra_files)
        if self._vision and jax.process_index() == 0:
            (self._partial / VISION_FOLDER).mkdir()
            copy_tensors(self._vision, self._partial / VISION_FOLDER / SINGLE_NAME)
        return self

    def add(self, part: str, arrays: Mapping[declared.Path, jax.Array]) -> None:
        """Writes one part. Host memory holds it once more while orbax writes it."""
        declarations = self._missing.pop(part)
        tree, arguments = {}, {}
        for declaration in declarations:
            array, name = arrays[declaration.path], array_name(declaration.path)
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
            chunk = tuple(open_array(folder, name).chunk_layout.read_chunk.shape)
            self._arrays[name] = Stored(array.shape, np.dtype(array.dtype).name, chunk, part)
            self._checksums[name] = dict(_shard_checksums(array, chunk))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._missing:
            raise CheckpointError(f"{self._partial}: parts {sorted(self._missing)} were never written")
        text_files.write_text(
            self._partial / f"checksums-{jax.process_index()}.json", json.dumps(self._checksums, indent=1)
        )
        barrier("checkpoint written")
        last = {}
        if jax.process_index() == 0:
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "dtype": self._dtype,
                "slot_experts": self._slot_experts,
                "arrays": {name: dataclasses.asdict(stored) for name, stored in self._arrays.items()},
                "files": part_sizes(self._partial),
            }
            last = {MANIFEST_NAME: json.dumps(manifest, indent=1), **self._config}
        publish(self._partial, self._directory, last)


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
            yield chunk_key(number), zlib.crc32(np.ascontiguousarray(part).view(np.uint8))
