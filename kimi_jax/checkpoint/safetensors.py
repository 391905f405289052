"""The safetensors container: every header checked before a tensor is read, byte ranges read afterwards.

A file is eight little-endian bytes of header length, a JSON header, and the tensors' bytes without holes. The
safetensors package maps whole tensors of one file at a time; a sharded loader needs the byte offsets themselves, and
needs every problem of every shard named before it begins.
"""

import contextlib
import errno
import gc
import json
import math
import os
import stat
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
import numpy as np

from kimi_jax.checkpoint.errors import CheckpointError, require_finished

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit, also applied to the index; the largest header of K2.6 has 0.5 MB."""

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
NUMPY_DTYPES = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""The types a tensor of this project may have; headers with others are read, their tensors refused by name."""


class Tensor(NamedTuple):
    """Where one tensor's bytes lie."""

    name: str
    file: Path
    dtype: str
    """Safetensors' name of the type, a key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)

    def error(self, cause: str) -> CheckpointError:
        """The error that names this tensor."""
        return CheckpointError(f"{self.file}: {self.name}: {cause}")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's cyclic collector, which would walk K2.6's 208,550 tensors again for every few of them made: it
    takes as long as the reading of the headers itself, and there are no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@collector_paused()
def open_checkpoint(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder by name, from the index and the headers of every shard it names.

    A folder holds `model.safetensors.index.json` with its shards, or one `model.safetensors`.

    Raises:
      CheckpointError: a missing, truncated, overlong or unreadable file; a header that breaks the format; an index and
        headers that disagree; an index that names anything but files of this folder; a folder never finished.
    """
    directory = Path(directory)
    require_finished(directory)
    index = directory / INDEX_NAME
    if not os.path.lexists(index):
        single = directory / SINGLE_NAME
        if not os.path.lexists(single):
            raise CheckpointError(f"{directory}: neither {INDEX_NAME} nor {SINGLE_NAME}; is this a checkpoint folder?")
        return read_header(single)
    weight_map, _ = read_index(index)
    counts = Counter(weight_map.values())
    for name in counts:
        if name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise CheckpointError(f"{index}: names the file {name!r}; shards are plain names of files beside the index")
    tensors: dict[str, Tensor] = {}
    for name, count in counts.items():
        file = directory / name
        if not file.exists() and not file.is_symlink():
            raise CheckpointError(f"{file}: missing shard ({count} tensors of the index); is the download complete?")
        for key, tensor in read_header(file).items():
            where = weight_map.get(key)
            if where != name:
                stands = "the index does not have it" if where is None else f"the index places it in {where}"
                raise tensor.error(f"stands in this shard's header, but {stands}")
            tensors[key] = tensor
    if len(tensors) != len(weight_map):
        absent = [key for key in weight_map if key not in tensors]
        raise CheckpointError(
            f"{directory / weight_map[absent[0]]}: {absent[0]}: the index places it in this shard, but the shard's "
            f"header does not have it{_more(len(absent) - 1)}"
        )
    return tensors


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, checked against the format and the size of the file.

    A name that stands twice leaves a hole, which is refused.

    Raises:
      CheckpointError: as `open_checkpoint`.
    """
    descriptor = open_regular(file)
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{file}: {size} bytes; too short for a safetensors header; truncated?")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: header length {length:,} exceeds {MAX_HEADER_BYTES:,}; not safetensors?")
        if 8 + length > size:
            raise CheckpointError(f"{file}: header of {length:,} bytes in a file of {size:,}; truncated?")
        text = stream.read(length)
    header = _parse_json(file, text, "header")
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(file, name, entry)
        tensor = tensors[name] = Tensor(name, file, dtype, shape, 8 + length + begin)
        if end - begin != tensor.nbytes:
            raise tensor.error(f"{dtype}{list(shape)} takes {tensor.nbytes:,} bytes, its offsets span {end - begin:,}")
        spans.append((begin, end, name))
    body, position = size - 8 - length, 0
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "follows a hole"
            raise tensors[name].error(f"{what}: begins at byte {begin:,} of the body, expected {position:,}")
        position = end
        if end > body:
            raise tensors[name].error(f"ends at byte {end:,} of a body of {body:,}; the file is truncated")
    if position != body:
        raise CheckpointError(f"{file}: {body - position:,} bytes after the last tensor; overwritten or wrong header?")
    return tensors


def _entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{file}: {name}: header entry without dtype, shape and two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: {name}: unknown dtype {dtype!r}")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise CheckpointError(f"{file}: {name}: shape {list(shape)} or offsets {[begin, end]} are not counts")
    return dtype, shape, begin, end


def read_index(index: Path) -> tuple[Mapping[str, str], int | None]:
    """File of each tensor, and the bytes of all where the index has them.

    Raises:
      as: `open_checkpoint`.
    """
    with os.fdopen(open_regular(index), "rb") as stream:
        if (size := os.fstat(stream.fileno()).st_size) > MAX_HEADER_BYTES:
            raise CheckpointError(f"{index}: {size:,} bytes, more than {MAX_HEADER_BYTES:,}; not an index")
        parsed = _parse_json(index, stream.read(), "index")
    weight_map, metadata = parsed.get("weight_map"), parsed.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{index}: {key}: file name {name!r} is not text")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(size) if isinstance(size, int | float) and size >= 0 else None


def _parse_json(file: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: broken JSON {what}: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: broken JSON {what}: not an object")
    return parsed


def _more(count: int) -> str:
    return f" (and {count:,} more)" if count > 0 else ""


def describe(problems: list[str], limit: int = 5) -> str:
    """Problems one a line, the first few in full."""
    shown = problems[:limit]
    return "\n".join(shown) + _more(len(problems) - len(shown))


def open_regular(file: Path) -> int:
    """Descriptor of a regular file opened for reading; links are followed (the hub's cache is made of them)."""
    try:
        # Without O_NONBLOCK the opening of a named pipe would wait for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        cause = {
            errno.ELOOP: "a loop of symbolic links",
            errno.ENOENT: "missing, or a link to a missing file; is the download complete?",
        }.get(error.errno or 0, str(error.strerror))
        raise CheckpointError(f"{file}: {cause}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{file}: not a regular file")
    return descriptor


class Files:
    """Positional reads from many files by many threads; each file is opened once."""

    def __init__(self):
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read_into(self, tensor: Tensor, offset: int, target: np.ndarray) -> None:
        """Fills `target`, contiguous uint8, from byte `offset` of the tensor.

        Raises:
          CheckpointError: the file has become shorter since its header was checked, or cannot be read.
        """
        with self._lock:
            descriptor = self._descriptors.get(tensor.file)
            if descriptor is None:
                descriptor = self._descriptors[tensor.file] = open_regular(tensor.file)
        view, position = memoryview(target), tensor.start + offset
        while view:
            try:
                count = os.preadv(descriptor, [view], position)
            except OSError as error:
                raise tensor.error(f"reading failed: {error.strerror}") from None
            if not count:
                raise tensor.error(f"the file ends at byte {position:,}; was it cut while being read?")
            view, position = view[count:], position + count


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Header of a file with these (name, dtype, shape), and each tensor's byte offset in the file.

    The order is the safetensors package's: wider types first (so that all are aligned), then by name; the header is
    padded to eight bytes and has no `__metadata__`, as in K2.6's own files.
    """
    ordered = sorted(tensors, key=lambda t: (_ALIGNMENT_ORDER.index(t[1]), t[0]))
    entries, position = {}, 0
    for name, dtype, shape in ordered:
        end = position + DTYPE_BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    body = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: body + e["data_offsets"][0] for name, e in entries.items()}


_ALIGNMENT_ORDER = ("I64", "F32", "I32", "BF16", "F16")
