"""Loads an HF checkpoint of safetensors shards into sharded arrays, streaming: each byte once, straight into place."""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax import parameters
from kimi_jax.checkpoint.errors import CheckpointError
from kimi_jax.checkpoint.plan import SKIPPED_FAMILIES, ArrayPlan, Plan, Read, Region, plan, weight_shape
from kimi_jax.checkpoint.safetensors import NUMPY_DTYPES, Files, Tensor, open_checkpoint
from kimi_jax.parallel.host_arrays import host_buffer
from kimi_jax.parallel.placement import EMPTY, SlotExperts
from kimi_jax.parameters import Parameters, Rules

CHUNK_BYTES = 8 << 20
"""Longest single read; also each thread's scratch memory where bytes are converted or rearranged."""

Progress = Callable[[int, int], None]
"""Called from reading threads, one at a time, with the bytes read so far and the bytes in all."""


@dataclasses.dataclass
class Counter:
    """Bytes read so far, told to `progress`."""

    progress: Progress | None
    total: int
    done: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add(self, nbytes: int) -> None:
        if self.progress:
            with self.lock:
                self.done += nbytes
                self.progress(self.done, self.total)


def load(
    directory: str | Path,
    module: nnx.Module,
    config_prefix: str,
    mesh: Mesh,
    rules: Rules,
    *,
    dtype: DTypeLike,
    num_experts: int,
    slot_experts: SlotExperts | None = None,
    skip: Sequence[str] = SKIPPED_FAMILIES,
    progress: Progress | None = None,
    workers: int = 8,
) -> Parameters:
    """Reads a checkpoint folder into sharded arrays; this process reads the bytes of its own devices only.

    Headers and sizes of all shards are checked, and every tensor matched, before anything else is read. Host memory
    stays within the local bytes (on CPU devices they are the arrays themselves) plus twice the largest array's local
    part plus `workers` × 8 MiB.

    Args:
      directory: holds `model.safetensors.index.json` and its shards, or one `model.safetensors`.
      module, config_prefix, mesh, rules, dtype, num_experts, slot_experts, skip: as for `plan`.
      progress: told of the bytes read; `progress_bar` makes one.
      workers: reading threads.

    Raises:
      CheckpointError: naming the file, the tensor and the cause; nothing is returned in part.
    """
    matched = plan(
        open_checkpoint(directory), module, config_prefix, mesh, rules,
        dtype=dtype, num_experts=num_experts, slot_experts=slot_experts, skip=skip,
    )  # fmt: skip
    return read(matched, module, progress=progress, workers=workers)


def read(matched: Plan, module: nnx.Module, *, progress: Progress | None = None, workers: int = 8) -> Parameters:
    """Executes this process's part of a plan.

    Raises:
      CheckpointError: as `load` does.
    """
    arrays = matched.local(jax.process_index())
    total = matched.read_bytes(jax.process_index()) if progress else 0
    leaves = read_arrays(arrays, Counter(progress, total), workers)
    return parameters.from_leaves(module, leaves)


def read_arrays(arrays: Sequence[ArrayPlan], count: Counter, workers: int) -> dict[parameters.Path, jax.Array]:
    """Reads the local parts of some arrays of a plan.

    Raises:
      CheckpointError: as `load` does.
    """
    budget, in_flight = 2 * max((array.nbytes for array in arrays), default=0), 0
    leaves: dict[parameters.Path, jax.Array] = {}
    waiting: deque[Reading] = deque()

    def finish() -> int:
        reading = waiting.popleft()
        leaves[reading.array.declaration.path] = reading.result()
        return reading.array.nbytes

    with Files() as files, reading_pool(workers) as pool:
        _check_weight_shapes(arrays, files, pool, count)
        for array in arrays:
            while waiting and in_flight + array.nbytes > budget:
                in_flight -= finish()
            waiting.append(Reading.start(array, files, pool, count))
            in_flight += array.nbytes
        while waiting:
            finish()
    return leaves


@contextlib.contextmanager
def reading_pool(workers: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads whose pending work is dropped when the body fails, so that the first error is the last thing done."""
    pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="checkpoint")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _check_weight_shapes(
    arrays: Sequence[ArrayPlan], files: Files, pool: concurrent.futures.Executor, count: Counter
) -> None:
    """Compares every `weight_shape` tensor with the declaration it belongs to."""

    def check(tensors: Sequence[Tensor], expected: tuple[int, int]) -> None:
        for tensor in tensors:
            stated = np.empty(2, NUMPY_DTYPES[tensor.dtype])
            files.read_into(tensor, 0, stated.view(np.uint8))
            if tuple(stated.tolist()) != expected:
                raise tensor.error(f"says {stated.tolist()}, expected {list(expected)}")
            count.add(tensor.nbytes)

    checks = []
    for array in arrays:
        if tensors := array.shape_tensors():
            checks.append(pool.submit(check, tensors, weight_shape(array)))
    for done in checks:
        done.result()


@dataclasses.dataclass
class Reading:
    """An array whose blocks, on this host, are being filled."""

    array: ArrayPlan
    blocks: list[np.ndarray]
    tasks: list[concurrent.futures.Future[None]]

    @classmethod
    def start(cls, array: ArrayPlan, files: Files, pool: concurrent.futures.Executor, count: Counter) -> "Reading":
        blocks = [
            host_buffer(block.shape, array.declaration.dtype, zero=EMPTY in array.slots[block.slot : block.slot_end])
            for block in array.blocks
        ]
        # A block as [slots, rows, columns] of the tensors it is made of.
        matrices = [
            host.reshape(block.slot_end - block.slot, block.region.row_end - block.region.row, -1)
            for host, block in zip(blocks, array.blocks, strict=True)
        ]
        tasks = [
            pool.submit(_fill, part, array.width, matrices, files, count)
            for read in array.reads()
            for part in _chunks(read)
        ]
        return cls(array, blocks, tasks)

    def result(self) -> jax.Array:
        """The array, once all is read and on its devices."""
        for task in self.tasks:
            task.result()
        shards = [
            jax.device_put(host, device)
            for host, block in zip(self.blocks, self.array.blocks, strict=True)
            for device in block.devices
        ]
        declaration = self.array.declaration
        whole = jax.make_array_from_single_device_arrays(declaration.shape, self.array.sharding, shards)
        return whole.block_until_ready()


def _chunks(read: Read) -> Iterator[Read]:
    """The read in bands of rows of at most CHUNK_BYTES (one row at least)."""
    region = read.region
    step = max(1, CHUNK_BYTES * (region.row_end - region.row) // max(1, read.nbytes))
    for row in range(region.row, region.row_end, step):
        yield read._replace(region=region._replace(row=row, row_end=min(row + step, region.row_end)))


def _fill(read: Read, width: int, matrices: Sequence[np.ndarray], files: Files, count: Counter) -> None:
    """Reads one region of a tensor, checks that it is finite and puts it where it belongs."""
    tensor, region, places = read
    dtype = NUMPY_DTYPES[tensor.dtype]
    targets = []
    for block, slot, whole in places:
        rows = slice(region.row - whole.row, region.row_end - whole.row)
        targets.append((matrices[block][slot, rows], whole))
    direct, whole = targets[0]
    alone = len(targets) == 1 and direct.dtype == dtype and _columns(whole) == _columns(region)
    buffer = direct if alone else np.empty((region.row_end - region.row, region.column_end - region.column), dtype)

    octets = buffer.view(np.uint8)
    if _columns(region) == (0, width):
        files.read_into(tensor, region.row * width * dtype.itemsize, octets.reshape(-1))
    else:
        for row, line in enumerate(octets, region.row):
            files.read_into(tensor, (row * width + region.column) * dtype.itemsize, line)
    require_finite(f"{tensor.file}: {tensor.name}", buffer)
    if not alone:
        for target, whole in targets:
            target[...] = buffer[:, whole.column - region.column : whole.column_end - region.column]
    count.add(read.nbytes)


def _columns(region: Region) -> tuple[int, int]:
    return region.column, region.column_end


def require_finite(where: str, values: np.ndarray) -> None:
    """Refuses NaN and infinity: floats whose exponent bits are all set."""
    exponent = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}.get(values.dtype.name)
    if exponent is None:
        return
    bits = values.view(np.uint16 if values.itemsize == 2 else np.uint32)
    if ((bits & exponent) == exponent).any():
        raise CheckpointError(f"{where}: holds NaN or infinity; damaged file?")
