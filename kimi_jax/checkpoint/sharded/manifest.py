"""What a sharded checkpoint holds: the manifest, the names and parts of its arrays, the files beside them."""

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorstore
from flax import nnx
from jax.typing import DTypeLike

from kimi_jax import parameters as declared
from kimi_jax.checkpoint.errors import UNFINISHED_NAME, CheckpointError, require_finished
from kimi_jax.checkpoint.safetensors import describe
from kimi_jax.parallel.placement import SlotExperts
from kimi_jax.parameters import Declaration

FORMAT, VERSION = "kimi_jax.orbax", 1
MANIFEST_NAME = "manifest.json"
VISION_FOLDER = "vision"
"""Where tower and projector are, as safetensors: no device has only a part of them."""
FOLDERS = ("parts", VISION_FOLDER)
"""What holds weights."""


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
    """Bytes of each file of `FOLDERS`."""


def is_sharded(directory: str | Path) -> bool:
    """Whether a folder is, or claims to be, a sharded checkpoint of this project."""
    return os.path.lexists(Path(directory) / MANIFEST_NAME)


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest, after comparing every file's presence and size with it.

    Raises:
      CheckpointError: no manifest (half-written, or another format), another format version, files missing or cut.
    """
    directory = Path(directory)
    require_finished(directory)
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
        slots = same_or_by_layer(raw["slot_experts"])
        files = {str(name): int(size) for name, size in raw["files"].items()}
        manifest = Manifest(arrays, slots, str(raw["dtype"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: broken manifest: {error!r}") from None
    found = part_sizes(directory)
    problems = [
        f"{directory / name}: {'missing' if name not in found else f'{found[name]:,} bytes'}, expected {size:,} bytes"
        for name, size in manifest.files.items()
        if found.get(name) != size
    ]
    if problems:
        raise CheckpointError(describe(problems))
    return manifest


def same_or_by_layer(slot_experts: Any) -> SlotExperts:
    """As a manifest keeps it: one tuple where all layers are alike, else one by layer (JSON has names for numbers)."""
    if not isinstance(slot_experts, Mapping):
        return tuple(slot_experts)
    layers = {int(layer): tuple(slots) for layer, slots in slot_experts.items()}
    return next(iter(layers.values())) if len(set(layers.values())) == 1 else layers


def parts(module: nnx.Module, dtype: DTypeLike) -> dict[str, list[Declaration]]:
    """The arrays of a module by the part they are stored in: one for each layer, one for the rest."""
    grouped: dict[str, list[Declaration]] = defaultdict(list)
    for declaration in declared.declarations(module, dtype):
        layer = next((name for name in declaration.path if isinstance(name, int)), None)
        grouped["rest" if layer is None else f"layer-{layer:05d}"].append(declaration)
    return dict(sorted(grouped.items()))


def array_name(path: declared.Path) -> str:
    """Of an array in the manifest, from its place in the model."""
    return ".".join(map(str, path))


def chunk_key(number: tuple[int, ...]) -> str:
    """Key of a chunk in the checksums, from its number along each axis."""
    return ",".join(map(str, number))


def open_array(folder: Path, name: str) -> Any:
    """An array of a part, as tensorstore opens it.

    Raises:
      CheckpointError: naming both.
    """
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    try:
        return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, read=True, open=True).result()
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder}: {name}: cannot be opened: {error}") from None


def part_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file of `FOLDERS`."""
    files = (path for folder in FOLDERS for path in (directory / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.stat().st_size for path in sorted(files)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      CheckpointError: naming the file.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def copyable_files(directory: Path) -> list[Path]:
    """What belongs to a checkpoint besides its weights: configuration, tokenizer, licence."""
    weights = (".safetensors", ".safetensors.index.json")
    ours = (MANIFEST_NAME, "checksums-", UNFINISHED_NAME)
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and not path.name.endswith(weights) and not path.name.startswith(ours)
    ]
