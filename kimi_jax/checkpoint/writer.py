"""Writes the HF layout: one safetensors shard a layer, one for the rest, the index and config.json.

Each process writes the bytes its devices hold, at their offsets, one array at a time. The folder appears under its name
when it is complete, never before; until then a marker stands in it, and its index and config.json are missing.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from kimi_jax import parameters as declared
from kimi_jax import text_files
from kimi_jax.checkpoint.errors import UNFINISHED_NAME, UNFINISHED_SUFFIX, CheckpointError
from kimi_jax.checkpoint.safetensors import DTYPE_BYTES, INDEX_NAME, NUMPY_DTYPES, Files, Tensor, encode_header
from kimi_jax.parallel.placement import EMPTY, SlotExperts, slots_of_layer
from kimi_jax.parameters import Declaration, Parameters
from kimi_jax.quantization import CODES_PER_WORD, Int4Weight
from kimi_jax.text_files import naming

CONFIG_NAME = "config.json"
COPIED_BYTES = 8 << 20
SAFETENSORS_NAMES = {kind: name for name, kind in NUMPY_DTYPES.items()}


def save(
    directory: str | Path,
    parameters: Parameters,
    module: nnx.Module,
    config_json: Mapping[str, Any],
    config_prefix: str,
    *,
    dtype: DTypeLike,
    num_experts: int,
    slot_experts: SlotExperts | None = None,
    extra_files: Iterable[Path] = (),
) -> None:
    """Writes parameters as an HF checkpoint folder; called by every process with the same arguments.

    Packed words, scales and router biases keep their bits; other weights are written as `dtype`, and keep their bits
    where they have it already. Host memory holds one device's part of one array at a time.

    Args:
      directory: to be created; an existing one must be empty.
      module, config_prefix, num_experts, slot_experts: as for `huggingface.load`. An expert in several slots is taken
        from the first.
      config_json: contents of config.json.
      dtype: of the weights that have none of their own, BF16 as published.
      extra_files: copied beside (tokenizer, generation_config.json).

    Raises:
      CheckpointError: the folder is in use, or a weight cannot be stored. A failed call leaves `DIRECTORY.incomplete`.
    """
    with Writer(
        directory, module, config_json, config_prefix,
        dtype=dtype, num_experts=num_experts, slot_experts=slot_experts, extra_files=extra_files,
    ) as writer:  # fmt: skip
        for declaration in declared.declarations(module, dtype):
            writer.add(declaration, leaf(parameters, declaration.path))


def leaf(parameters: Parameters, path: declared.Path) -> jax.Array:
    """The array of a declaration."""
    node: Any = parameters
    for name in path:
        node = getattr(node, str(name)) if isinstance(node, Int4Weight) else node[name]
    return node


class Writer:
    """A checkpoint folder being written, for parameters that are never in memory all at once. Arguments as for `save`.

    All arrays of the module are given to `add`, in any order, within the `with` block; leaving it without an error
    completes the folder.
    """

    def __init__(
        self,
        directory: str | Path,
        module: nnx.Module,
        config_json: Mapping[str, Any],
        config_prefix: str,
        *,
        dtype: DTypeLike,
        num_experts: int,
        slot_experts: SlotExperts | None = None,
        extra_files: Iterable[Path] = (),
        copied: Sequence[Tensor] = (),
    ):
        """`copied` are tensors of another checkpoint that keep their names and bytes, in a shard of their own."""
        self._directory = self._partial = Path(directory)
        self._copied = tuple(copied)
        self._prefix, self._num_experts = config_prefix, num_experts
        self._slot_experts: SlotExperts = range(num_experts) if slot_experts is None else slot_experts
        self._config_json, self._extra_files = config_json, tuple(extra_files)
        self._missing = {d.path: d for d in declared.declarations(module, dtype)}
        self._shards = self._layout()
        self._tensors: dict[str, tuple[Path, int]] = {}
        """File and byte offset of each tensor."""

    def _layout(self) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
        """(Key, dtype, shape) of each shard's tensors by the shard's name: layers first, then everything else."""
        groups: dict[int | None, list[tuple[str, str, tuple[int, ...]]]] = {}
        for declaration in self._missing.values():
            dtype = SAFETENSORS_NAMES.get(declaration.dtype)
            if dtype is None:
                raise CheckpointError(f"{self._prefix}{declaration.key(0)}: {declaration.dtype} cannot be written")
            layer = next((part for part in declaration.path if isinstance(part, int)), None)
            group = groups.setdefault(layer, [])
            for expert, key in self._keys(declaration):
                group.append((key, dtype, declaration.shape if expert is None else declaration.shape[1:]))
                if declaration.path[-1] == "packed":
                    group.append((_shape_key(key), "I32", (2,)))
        ordered = sorted(groups, key=lambda layer: math.inf if layer is None else layer)
        count = len(ordered) + bool(self._copied)
        return {
            f"model-{number:05d}-of-{count:06d}.safetensors": groups[layer] for number, layer in enumerate(ordered, 1)
        }

    def _keys(self, declaration: Declaration) -> list[tuple[int | None, str]]:
        experts = range(self._num_experts) if declaration.stacked else (None,)
        return [(expert, self._prefix + declaration.key(expert)) for expert in experts]

    def __enter__(self) -> Self:
        self._partial = prepare(self._directory, self._extra_files)
        weight_map, total = {}, 0
        for name, tensors in self._shards.items():
            header, offsets = encode_header(tensors)
            body = sum(DTYPE_BYTES[dtype] * math.prod(shape) for _, dtype, shape in tensors)
            file = self._partial / name
            self._tensors |= {key: (file, offset) for key, offset in offsets.items()}
            weight_map |= dict.fromkeys(offsets, name)
            total += body
            if jax.process_index() == 0:
                with naming(file), open(file, "xb") as stream:
                    stream.write(header)
                    stream.truncate(len(header) + body)
        if self._copied:
            count = len(self._shards) + 1
            name = f"model-{count:05d}-of-{count:06d}.safetensors"
            weight_map |= {tensor.name: name for tensor in self._copied}
            total += sum(tensor.nbytes for tensor in self._copied)
            if jax.process_index() == 0:
                copy_tensors(self._copied, self._partial / name)
        self._index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        barrier("checkpoint created")
        return self

    def add(self, declaration: Declaration, array: jax.Array) -> None:
        """Writes this process's part of one array. Replicas are written by the process that holds the first."""
        del self._missing[declaration.path]
        if array.shape != declaration.shape:
            raise CheckpointError(f"{declaration.path}: has shape {array.shape}, expected {declaration.shape}")
        if declaration.fixed and array.dtype != declaration.dtype:
            raise CheckpointError(f"{declaration.path}: is {array.dtype}, expected {declaration.dtype}")
        slot_experts = slots_of_layer(self._slot_experts, declaration.path) if declaration.stacked else ()
        for shard in array.addressable_shards:
            if shard.replica_id:
                continue
            bounds = [s.indices(size)[:2] for s, size in zip(shard.index, array.shape, strict=True)]
            data = np.asarray(shard.data).astype(declaration.dtype, copy=False)
            if not declaration.stacked:
                self._write(self._prefix + declaration.key(), declaration.shape, bounds, data)
                continue
            for slot in range(*bounds[0]):
                expert = slot_experts[slot] if slot < len(slot_experts) else EMPTY
                if expert == EMPTY or slot_experts.index(expert) != slot:
                    continue
                key = self._prefix + declaration.key(expert)
                self._write(key, declaration.shape[1:], bounds[1:], data[slot - bounds[0][0]])
                if declaration.path[-1] == "packed" and all(start == 0 for start, _ in bounds[1:]):
                    _, out, words = declaration.shape
                    stated = np.array([out, words * CODES_PER_WORD], np.int32)
                    self._write(_shape_key(key), (2,), [(0, 2)], stated)

    def _write(self, key: str, shape: tuple[int, ...], bounds: Sequence[tuple[int, int]], data: np.ndarray) -> None:
        """Writes a rectangle of a tensor: whole rows at once, parts of rows one by one."""
        file, start = self._tensors[key]
        row = bounds[0][0]
        width, depth = math.prod(shape[1:]), math.prod(shape[2:])
        column = bounds[1][0] * depth if len(bounds) > 1 else 0
        octets = np.ascontiguousarray(data).reshape(data.shape[0], -1).view(np.uint8)
        with naming(file), open(file, "r+b", buffering=0) as stream:
            if octets.shape[1] == width * data.itemsize:
                _write_all(stream.fileno(), octets.reshape(-1), start + row * width * data.itemsize)
            else:
                for number, line in enumerate(octets, row):
                    _write_all(stream.fileno(), line, start + (number * width + column) * data.itemsize)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._missing:
            paths = [".".join(map(str, path)) for path in self._missing]
            raise CheckpointError(f"{self._partial}: {len(paths)} arrays were never written, first {paths[0]}")
        for name in self._shards:
            _sync(self._partial / name)
        barrier("checkpoint written")
        last = {INDEX_NAME: self._index, CONFIG_NAME: self._config_json}
        texts = {name: json.dumps(content, indent=2, sort_keys=True) for name, content in last.items()}
        publish(self._partial, self._directory, texts)


def copy_tensors(tensors: Sequence[Tensor], file: Path) -> None:
    """Writes a new file of tensors with the bytes that others have, a few MiB in memory at a time."""
    header, offsets = encode_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors])
    with Files() as files, naming(file), open(file, "xb", buffering=0) as stream:
        _write_all(stream.fileno(), np.frombuffer(header, np.uint8), 0)
        for tensor in tensors:
            for first in range(0, tensor.nbytes, COPIED_BYTES):
                piece = np.empty(min(COPIED_BYTES, tensor.nbytes - first), np.uint8)
                files.read_into(tensor, first, piece)
                _write_all(stream.fileno(), piece, offsets[tensor.name] + first)
        os.fsync(stream.fileno())


def _shape_key(packed_key: str) -> str:
    return packed_key.removesuffix("_packed") + "_shape"


def _write_all(descriptor: int, octets: np.ndarray, position: int) -> None:
    view = memoryview(octets)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prepare(directory: Path, extra_files: Iterable[Path]) -> Path:
    """Creates `DIRECTORY.incomplete`, from the first process, and returns its path.

    It holds the marker of what is not finished and copies of `extra_files`, but for config.json: see `publish`.

    Raises:
      CheckpointError: the folder itself exists and is not empty.
    """
    partial = directory.with_name(directory.name + UNFINISHED_SUFFIX)
    if jax.process_index() == 0:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise CheckpointError(f"{directory}: exists and is not an empty folder; name a new one")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        text_files.write_text(partial / UNFINISHED_NAME, "This folder is being written, or its writing was cut.\n")
        for extra in extra_files:
            if extra.name != CONFIG_NAME:
                shutil.copyfile(extra, partial / extra.name)
    barrier("checkpoint folder")
    return partial


def publish(partial: Path, directory: Path, last: Mapping[str, str]) -> None:
    """Adds the files without which nothing loads, in their order, and gives the complete folder its name."""
    if jax.process_index() == 0:
        for name, text in last.items():
            text_files.write_text(partial / name, text)
        _sync(partial)
        (partial / UNFINISHED_NAME).unlink()
        os.replace(partial, directory)
        _sync(directory.parent)
    barrier("checkpoint complete")


def barrier(name: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
