"""From host memory to arrays over all processes' devices. It all happens between dispatches, never in a round."""

import math
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped


def place(values: Shaped[np.ndarray, "*shape"], mesh: Mesh, spec: PartitionSpec) -> Shaped[Array, "*shape"]:
    """A global array of values that every process has: each takes its devices' parts, nothing is sent."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


def require_agreement(what: str, value: object) -> None:
    """Compares a value's `repr` over all processes, which call this together: one that differs would end in a hang.

    Raises:
      ValueError: naming the processes that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    checksums = multihost_utils.process_allgather(np.uint32(zlib.crc32(repr(value).encode())))
    if different := np.flatnonzero(checksums != checksums[0]).tolist():
        raise ValueError(
            f"process {', '.join(map(str, different))} has other {what} than process 0: give all the same command, and "
            "prompts as arguments or files (standard input often reaches process 0 only)"
        )


def of_process_0(value: float) -> float:
    """Process 0's value, in float32, so that all take the same decisions by it. All processes call this together."""
    return value if jax.process_count() == 1 else float(multihost_utils.broadcast_one_to_all(np.float32(value)))


def bytes_of_process_0(value: bytes) -> bytes:
    """What process 0 gives; the others give as many bytes of any kind. All processes call this together."""
    if jax.process_count() == 1:
        return value
    return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(value, np.uint8)), np.uint8).tobytes()


def require_devices(mesh: Mesh) -> None:
    """Refuses a mesh in which this process has no device: it could not take part in a step.

    Raises:
      ValueError: no device of the mesh is this process's.
    """
    if not any(device.process_index == jax.process_index() for device in mesh.devices.flat):
        used = len({device.process_index for device in mesh.devices.flat})
        raise ValueError(
            f"the layout uses {mesh.size} of {jax.device_count()} devices and none of this process's: start only "
            f"{used} processes, or take a layout that uses the whole machine"
        )


def host_buffer(shape: tuple[int, ...], dtype: np.dtype, zero: bool) -> np.ndarray:
    """Host memory for one block, aligned so that CPU devices can use it in place; zeros only where asked."""
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    raw = (np.zeros if zero else np.empty)(size + alignment, np.uint8)
    first = -raw.ctypes.data % alignment
    return raw[first : first + size].view(dtype).reshape(shape)
