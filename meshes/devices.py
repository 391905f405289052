"""Devices for a preset: the machine's GPUs, or CPU devices that stand in for them."""

import contextlib
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshes.hardware import GPUS, card_of
from meshes.presets import AXES, Preset

if TYPE_CHECKING:
    import jax
    from jaxlib._jax import Device


class DeviceError(RuntimeError):
    """The devices found are not those a preset needs; the message names both."""


@dataclass(frozen=True)
class Devices:
    """What `select_devices` chose, and one line for the user that says so."""

    devices: tuple["Device", ...]
    simulated: bool
    notice: str


def visible_gpu_count() -> int:
    """Count the GPUs that the NVIDIA driver shows to this process, 0 without a driver. Does not import jax."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def use_cpu_if_no_gpu() -> bool:
    """Keep jax on the CPU where no GPU is visible, and return whether one is.

    The CUDA plugin checks the driver while jax starts its backends and logs a traceback where there is none. With
    jax's platform set to `cpu` beforehand it skips that check but still registers, so that compiling for a GPU that
    is not there (`meshes.targets`) works in the same process. A platform that the user chose is left alone.
    """
    import jax

    has_gpu = visible_gpu_count() > 0
    if not has_gpu and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    return has_gpu


def simulate(num_devices: int) -> list["Device"]:
    """Make this process show `num_devices` CPU devices and return all CPU devices of all processes.

    Must come before jax first touches a device. Asking again for as many or fewer is fine.

    Raises:
      DeviceError: jax's backends have started with fewer devices.
    """
    import jax

    with contextlib.suppress(RuntimeError):  # jax has started: then what it shows has to do
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    found = jax.local_device_count("cpu")
    if found < num_devices:
        raise DeviceError(
            f"{num_devices} CPU devices wanted, but jax has already started with {found}: "
            "call simulate() before anything touches a jax device or array"
        )
    return jax.devices("cpu")


def select_devices(preset: Preset, *, simulated: bool | None = None, num_processes: int = 1) -> Devices:
    """Find the devices for a preset, in an order that `build_mesh` can use.

    simulated: True for CPU devices, False for GPUs, None for GPUs where the driver shows any.
    num_processes: of `jax.distributed`, each of which simulates its share of the devices.

    Raises:
      DeviceError: too few GPUs, GPUs of another kind, or a number of processes that does not divide the devices.
    """
    needed = preset.layout.num_devices
    if simulated is None:
        simulated = visible_gpu_count() == 0
    if simulated:
        if needed % num_processes:
            raise DeviceError(f"{preset.name} has {needed} devices, which {num_processes} processes cannot share")
        devices = simulate(needed // num_processes)[:needed]
        what = "1 CPU device" if needed == 1 else f"{needed} CPU devices"
        return Devices(tuple(devices), True, f"{preset.name}: {preset.layout}, simulated on {what}")

    import jax

    try:
        found = jax.devices("gpu")
    except RuntimeError as error:
        raise DeviceError(f"{preset.name} needs {needed} GPUs and jax finds none: {error}") from error
    kind = found[0].device_kind
    if card_of(kind, preset.gpu_names) is None:
        wanted = ", ".join(GPUS[name].device_kind for name in preset.gpu_names)
        raise DeviceError(f"{preset.name} is made of {wanted}; this machine has {len(found)} × {kind}")
    if len(found) < needed:
        raise DeviceError(
            f"{preset.name} with {preset.layout} needs {needed} GPUs; this machine has {len(found)} × {kind}. "
            "Take a smaller mesh, start all its processes, or simulate it on CPU devices"
        )
    return Devices(tuple(found), False, f"{preset.name}: {preset.layout} on {needed} × {kind}")


def build_mesh(preset: Preset, devices: Sequence["Device"]) -> "jax.sharding.Mesh":
    """Lay the axes (dp, ep, tp) on devices; tp is innermost, so that its groups are neighbours in a node or domain.

    Devices beyond the layout's number are left out.

    Raises:
      DeviceError: fewer devices than the layout has.
    """
    import jax

    sizes = tuple(preset.layout.axis_sizes.values())
    needed = math.prod(sizes)
    if len(devices) < needed:
        raise DeviceError(f"{preset.name} with {preset.layout} needs {needed} devices; {len(devices)} given")

    def place(device: "Device") -> tuple[int, int, int]:
        # A GPU's slice is its NVLink domain; CPU devices have none.
        return getattr(device, "slice_index", None) or 0, device.process_index, device.id

    return jax.sharding.Mesh(np.array(sorted(devices, key=place)[:needed]).reshape(sizes), AXES)
