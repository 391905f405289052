"""The same hardware as a compile target: XLA compiles for it on a machine that does not have it."""

from typing import TYPE_CHECKING

from meshes.devices import use_cpu_if_no_gpu
from meshes.hardware import GPU, gpu
from meshes.presets import Preset

if TYPE_CHECKING:
    from jaxlib._jax import Device

TARGETS = ("h100", "h200", "b200", "gb200", "b300", "gb300")

# Common to all of them: threads, registers and shared memory of a Hopper or Blackwell data-centre core.
_FP16, _FP32, _BF16 = 10, 11, 16  # XLA's PrimitiveType numbers


def _rate(dtype: int, clock_ghz: float, units_per_core: int, ops_per_clock: int) -> str:
    value = f"clock_rate_ghz: {clock_ghz} units_per_core: {units_per_core} ops_per_clock: {ops_per_clock}"
    return f"rate_infos {{ key: {dtype} value {{ {value} }} }}"


def _device_name(card: GPU) -> str:
    return "NVIDIA H100 80GB HBM3" if card.name == "h100" else card.device_kind


def target(gpu_name: str) -> str:
    """Describe a GPU as the text of XLA's `GpuTargetConfigProto`, from the facts in `meshes.hardware`.

    Raises:
      ValueError: unknown GPU, or one that programs are not compiled for; the message lists the targets.
    """
    card = gpu(gpu_name)
    if card.name not in TARGETS:
        raise ValueError(f"{card.name} is not a compile target: choose from {', '.join(TARGETS)}")
    major, minor = card.compute_capability
    ops = card.tensor_bf16_ops_per_clock
    scalar = f"{_rate(_FP32, card.clock_ghz, 128, 1)} {_rate(_BF16, card.clock_ghz, 128, 1)}"
    matrix = " ".join(
        _rate(dtype, card.tensor_clock_ghz, 4, rate) for dtype, rate in ((_FP16, ops), (_BF16, ops), (_FP32, ops // 2))
    )
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: {card.core_count} fpus_per_core: 128 clock_rate_ghz: {card.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {card.compiler_hbm_bytes_per_s} l2_cache_size: {card.l2_bytes}
  device_memory_size: {card.compiler_hbm_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  scalar_unit_description {{ {scalar} }}
  matrix_unit_description {{ {matrix} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {major}.{minor}a"
  device_address_bits: 64 ecc_enabled: true name: "{_device_name(card)}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.15.0"
  device_interconnect_info {{ active_links: 18 }}
  collective_memory_granularity: 2097152
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 15 patch: 0 }}
device_description_str: "{_device_name(card)}"
"""


def topology_devices(preset: Preset, gpu_name: str) -> list["Device"]:
    """Make the preset's devices for compiling only, as `meshes.build_mesh` takes them.

    Nothing can run on them. They work on a machine without a GPU if jax's CUDA plugin is installed.

    Raises:
      LayoutError: the preset's machine does not exist with this GPU.
      RuntimeError: the CUDA plugin is missing.
    """
    config = target(gpu_name)
    preset.check_gpu(gpu_name.lower())
    use_cpu_if_no_gpu()
    from jax.experimental import topologies

    topology = preset.topology
    domain = min(topology.gpus_per_domain, preset.layout.num_devices)
    node = min(topology.gpus_per_node, domain)
    if domain % node:
        domain = topology.gpus_per_domain
    # Slices (NVLink domains) × hosts of one slice × devices of one host.
    slices = -(-preset.layout.num_devices // domain)
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=f"{preset.name}-{gpu_name.lower()}",
            topology=f"{slices}x{domain // node}x{node}",
            target_config=config,
        )
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError("compiling for a GPU needs jax's CUDA plugin: install the extra cuda12 or cuda13") from error
    return list(description.devices)
