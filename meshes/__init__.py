"""Machines and layouts: what the hardware is and how the mesh axes lie on it."""

from meshes.devices import DeviceError, Devices, build_mesh, select_devices, simulate, use_cpu_if_no_gpu
from meshes.hardware import GPU, GPUS, Link, gpu
from meshes.presets import AXES, PRESETS, Layout, LayoutError, Preset, expert_slots, preset
from meshes.targets import TARGETS, target, topology_devices
from meshes.topology import AxisSpan, Topology, axis_span

__all__ = [
    "AXES", "GPU", "GPUS", "PRESETS", "TARGETS", "AxisSpan", "DeviceError", "Devices", "Layout", "LayoutError",
    "Link", "Preset", "Topology", "axis_span", "build_mesh", "expert_slots", "gpu", "preset", "select_devices",
    "simulate", "target", "topology_devices", "use_cpu_if_no_gpu",
]  # fmt: skip
