"""Between the HF layout and sharded checkpoints, one layer in memory at a time."""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax.checkpoint import huggingface, writer
from kimi_jax.checkpoint.huggingface import Counter, Progress
from kimi_jax.checkpoint.plan import plan
from kimi_jax.checkpoint.safetensors import open_checkpoint
from kimi_jax.checkpoint.sharded.manifest import VISION_FOLDER, copyable_files, parts, read_json
from kimi_jax.checkpoint.sharded.reader import Reader
from kimi_jax.checkpoint.sharded.writer import Writer
from kimi_jax.parallel.placement import SlotExperts


class _Whole(dict[str, None]):
    """Rules that cut nothing."""

    def __missing__(self, axis: str) -> None:
        return None


def _one_device() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("device",))


def to_orbax(
    source: str | Path,
    target: str | Path,
    module: nnx.Module,
    config_prefix: str,
    *,
    num_experts: int,
    dtype: DTypeLike,
    slot_experts: SlotExperts | None = None,
    progress: Progress | None = None,
    workers: int = 8,
) -> None:
    """Writes an HF checkpoint as a sharded one, expert i in slot i where no placement is given.

    Memory: a layer's arrays and what orbax copies of them.

    Args:
      source, target: existing and new folder.
      module, config_prefix, num_experts, dtype, slot_experts, progress, workers: as for `huggingface.load`.

    Raises:
      CheckpointError: as `huggingface.load`; the target is in use.
    """
    source = Path(source)
    matched = plan(
        open_checkpoint(source), module, config_prefix, _one_device(), _Whole(),
        dtype=dtype, num_experts=num_experts, slot_experts=slot_experts,
    )  # fmt: skip
    process = jax.process_index()
    arrays = {array.declaration.path: array for array in matched.local(process)}
    count = Counter(progress, matched.read_bytes(process))
    extra_files = copyable_files(source)
    slots = range(num_experts) if slot_experts is None else slot_experts
    with Writer(
        target, module, dtype=dtype, slot_experts=slots, extra_files=extra_files, vision=matched.skipped
    ) as sharded:
        for part, declarations in parts(module, dtype).items():
            needed = sorted((arrays[d.path] for d in declarations), key=lambda array: array.position())
            sharded.add(part, huggingface.read_arrays(needed, count, workers))


def to_huggingface(
    source: str | Path,
    target: str | Path,
    module: nnx.Module,
    config_prefix: str,
    *,
    num_experts: int,
    progress: Progress | None = None,
    workers: int = 8,
) -> None:
    """Writes a sharded checkpoint in the HF layout, tensors byte-identical to those it was made from.

    Memory: a layer's arrays. Arguments as for `to_orbax`; the weights keep the type they were stored with.

    Raises:
      CheckpointError: as `sharded.reader.restore`; the target is in use.
    """
    source = Path(source)
    reader = Reader(source, _one_device(), _Whole(), workers)
    dtype = reader.manifest.dtype
    grouped = parts(module, dtype)
    everything = [d for declarations in grouped.values() for d in declarations]
    reader.check(everything)
    count = Counter(progress, sum(map(reader.local_bytes, everything)))
    extra_files = [path for path in copyable_files(source) if path.name != "config.json"]
    config_json = read_json(source / "config.json")
    vision = source / VISION_FOLDER
    copied = tuple(open_checkpoint(vision).values()) if vision.exists() else ()
    with writer.Writer(
        target,
        module,
        config_json,
        config_prefix,
        dtype=dtype,
        num_experts=num_experts,
        extra_files=extra_files,
        copied=copied,
    ) as layout:
        for declarations in grouped.values():
            for declaration in declarations:
                leaves = reader.read([declaration], range(num_experts), count)
                layout.add(declaration, leaves[declaration.path])
