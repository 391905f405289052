"""What this machine has, what the project would use of it, and what stands in the way."""

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kimi_jax.parallel.processes import launched
from meshes.devices import visible_gpu_count
from meshes.environment import Setting, settings
from meshes.hardware import GPUS, card_of
from meshes.presets import PRESETS, Preset

if TYPE_CHECKING:
    from kimi_jax.decoding.kernels import Pick

PACKAGES = (
    "jax", "jaxlib", "flax", "orbax-checkpoint", "jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin",
    "jax-cuda13-pjrt", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc",
)  # fmt: skip
OLDEST_JAX, NEWEST_JAX = (0, 11, 2), (0, 13)
"""Versions that pyproject.toml allows: from the first, before the second."""
DRIVERS = {"cuda12": (525, "CUDA 12"), "cuda13": (580, "CUDA 13")}
"""First Linux driver branch of each CUDA version (NVIDIA, CUDA compatibility)."""
CARD_DRIVERS = ((r"\bG?B300\b", 575), (r"\bG?B(100|200)\b|\bBlackwell\b", 570))
"""First driver branch of each family of cards, by what they are called."""
WRONG_PTXAS = ((12, 8), (12, 9, 86))
"""Versions of ptxas that miscompile masked attention, from the first up to the second, which is CUDA 12.9.1: jax's own
attention kernels refuse the same."""
GB, GIB = 1e9, 1024**3

Level = Literal["fault", "note"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong (`fault`), or worth knowing (`note`), and what to do."""

    level: Level
    what: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was found on the machine, before any judgement."""

    python: str
    packages: Mapping[str, str]
    """Installed versions of PACKAGES."""
    driver: str | None
    """NVIDIA driver's version; None without one."""
    ptxas: str | None
    """Version of the assembler that jax uses: its wheel's, or else of the one on PATH."""
    gpus: int
    """GPUs that the driver shows to this process."""
    gpu_kinds: tuple[str, ...]
    """What jax calls its devices, one for each, where it has GPUs."""
    gpu_bytes: int | None
    """Memory of a GPU that jax may use."""
    gpu_error: str | None
    """Why jax has no GPUs although the driver shows some."""
    host_bytes: int
    host_free_bytes: int
    cores: int
    shared_memory_bytes: int
    """Size of /dev/shm, through which NCCL connects processes of one host."""
    environment: Mapping[str, str]
    flags_error: str | None
    """What jaxlib says of XLA_FLAGS where it refuses them."""
    imex: bool
    """Whether there is a channel for NVLink between trays."""
    infiniband: bool


def gather() -> Facts:
    """Looks at this machine. XLA_FLAGS that jaxlib refuses are dropped from this process, which could not go on."""
    flags_error = check_flags(os.environ.get("XLA_FLAGS", ""))
    environment = dict(os.environ)
    if flags_error:
        del os.environ["XLA_FLAGS"]
    gpus = visible_gpu_count()
    kinds, size, error = _jax_gpus() if gpus else ((), None, None)
    shm = os.statvfs("/dev/shm") if os.path.exists("/dev/shm") else None
    free = re.search(r"MemAvailable:\s+(\d+)", _read("/proc/meminfo"))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Facts(
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
        driver=_driver(),
        ptxas=_version("nvidia-cuda-nvcc-cu12") or _version("nvidia-cuda-nvcc") or _ptxas(),
        gpus=gpus,
        gpu_kinds=kinds,
        gpu_bytes=size,
        gpu_error=error,
        host_bytes=host,
        host_free_bytes=int(free[1]) * 1024 if free else host,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        shared_memory_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        environment=environment,
        flags_error=flags_error,
        imex=any(Path("/dev/nvidia-caps-imex-channels").glob("channel*")),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
    )


def check_flags(flags: str) -> str | None:
    """What jaxlib says against XLA flags, None where it takes them. Tried in a process of its own, which they end."""
    if not flags.strip():
        return None
    code = "import jax; jax.devices()"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if not result.returncode:
        return None
    lines = [line for line in result.stderr.splitlines() if "XLA_FLAGS" in line or "flag" in line.lower()]
    return (lines or result.stderr.splitlines() or ["jaxlib ended without a message"])[-1].split("] ")[-1]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """From the kernel module, or from NVML, which containers have."""
    if found := re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", _read("/proc/driver/nvidia/version")):
        return found[1]
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, 80):
        return None
    return text.value.decode()


def _ptxas() -> str | None:
    try:
        said = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    found = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return found[1] if found else None


def _jax_gpus() -> tuple[tuple[str, ...], int | None, str | None]:
    import jax

    try:
        devices = jax.local_devices(backend="gpu")
    except RuntimeError as error:
        return (), None, str(error).splitlines()[0]
    stats = devices[0].memory_stats() or {}
    return tuple(device.device_kind for device in devices), stats.get("bytes_limit"), None


Check = tuple[object, str, str]
"""Whether something is found, what it is, and what to do."""


def examine(facts: Facts, machine: Preset | None = None) -> list[Finding]:
    """Faults first. With a machine also what its nodes need."""
    faults, notes = [*_versions(facts), *_gpu_faults(facts), *_surroundings(facts)], _notes(facts)
    if machine is not None and facts.gpus:
        faults += _node(facts, machine)
        unset = ", ".join(setting.name for setting in settings(machine) if not _is_set(facts, setting))
        notes.append(
            (unset, f"not set: {unset}", f'eval "$(uv run scripts/doctor.py --mesh {machine.name} --exports)"')
        )
    levels: tuple[tuple[Level, list[Check]], ...] = (("fault", faults), ("note", notes))
    return [Finding(level, what, fix) for level, checks in levels for found, what, fix in checks if found]


def _is_set(facts: Facts, setting: Setting) -> bool:
    return setting.name in (facts.environment.get("XLA_FLAGS", "") if setting.is_xla_flag else facts.environment)


# fmt: off
def _versions(facts: Facts) -> list[Check]:
    packages = facts.packages
    jax, jaxlib = packages.get("jax", ""), packages.get("jaxlib", "")
    wheels = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    return [
        (not OLDEST_JAX <= _numbers(jax) < NEWEST_JAX,
         f"jax {jax or 'is not installed'}; the project runs on 0.11.2 up to 0.12", "uv sync"),
        (_numbers(jax)[:3] != _numbers(jaxlib)[:3],
         f"jax {jax} with jaxlib {jaxlib}", "install the two of one version: uv sync"),
        *((_numbers(packages[name])[:3] != _numbers(jaxlib)[:3],
           f"{name} {packages[name]} with jaxlib {jaxlib}", "install one version of all: uv sync")
          for name in wheels if name in packages),
        ({"jax-cuda12-plugin", "jax-cuda13-plugin"} <= packages.keys(),
         "plugins for CUDA 12 and CUDA 13 are installed together: jax would load either",
         "keep one: uv sync, or uv sync --no-group cuda12 --group cuda13"),
        ({"nvidia-nccl-cu12", "nvidia-nccl-cu13"} <= packages.keys(),
         "two NCCL wheels are installed and write the same file, nvidia/nccl/lib/libnccl.so.2",
         "pip uninstall both, then install one again: uv sync --reinstall-package nvidia-nccl-cu12"),
    ]


def _gpu_faults(facts: Facts) -> list[Check]:
    plugins = [name for name in DRIVERS if f"jax-{name}-plugin" in facts.packages]
    needing = [(cuda, oldest) for oldest, cuda in map(DRIVERS.__getitem__, plugins)]
    for kind in sorted(set(facts.gpu_kinds)):
        needing.append((kind, next((branch for name, branch in CARD_DRIVERS if re.search(name, kind)), 0)))
    first, right = WRONG_PTXAS
    return [
        (facts.gpus and not plugins,
         f"{facts.gpus} GPUs, and no CUDA plugin for jax", "uv sync (brings jax[cuda12])"),
        *((facts.driver and _numbers(facts.driver) < (oldest,),
           f"driver {facts.driver} is too old for {what}, which needs {oldest} or newer", "update the driver")
          for what, oldest in needing),
        (facts.ptxas and first <= _numbers(facts.ptxas) < right,
         f"ptxas {facts.ptxas} miscompiles masked attention, as every version from 12.8.0 up to 12.9.0 does",
         "install that of CUDA 12.9.1 or newer: uv sync, or pip install 'nvidia-cuda-nvcc-cu12>=12.9.86'"),
        (facts.gpu_error,
         f"the driver shows {facts.gpus} GPUs and jax finds none: {facts.gpu_error}", "see the other faults"),
    ]


def _surroundings(facts: Facts) -> list[Check]:
    platforms = facts.environment.get("JAX_PLATFORMS", "")
    return [
        (facts.flags_error,
         f"jaxlib refuses XLA_FLAGS: {facts.flags_error}", "remove the flag; every script would end at once"),
        (facts.gpus and platforms and not {"cuda", "gpu"} & set(platforms.split(",")),
         f"JAX_PLATFORMS is {platforms}: the GPUs stay unused", "unset JAX_PLATFORMS"),
        (facts.gpus > 1 and facts.shared_memory_bytes < GIB,
         f"/dev/shm has {facts.shared_memory_bytes / GIB:.2f} GiB; NCCL needs about 1 GiB a node",
         "docker --shm-size=8g, or an emptyDir of medium Memory at /dev/shm in Kubernetes"),
    ]


def _notes(facts: Facts) -> list[Check]:
    why = "no NVIDIA driver" if facts.driver is None else f"driver {facts.driver} shows no GPU to this process"
    libraries, environment = facts.environment.get("LD_LIBRARY_PATH", ""), facts.environment
    return [
        (not facts.gpus, f"{why}: meshes are simulated on the CPU, in float32", "nothing, for a first look"),
        *((card_of(kind) is None, f"{kind} is no GPU of a preset", "meshes/hardware.py lists them; --mesh local")
          for kind in sorted(set(facts.gpu_kinds))),
        (facts.gpus and re.search(r"cuda|cudnn|nccl", libraries, re.IGNORECASE),
         "LD_LIBRARY_PATH names CUDA libraries, which are then loaded instead of jax's own wheels",
         "unset LD_LIBRARY_PATH where jax reports a wrong version of cuDNN, cuBLAS or NCCL"),
        (launched(environment) is not None and any("_proxy" in name.lower() for name in environment),
         "proxy variables are set", "unset them where processes do not find their coordinator"),
    ]


def _node(facts: Facts, machine: Preset) -> list[Check]:
    """What a node with GPUs may lack for its part of a machine."""
    topology = machine.topology
    node, domain = topology.gpus_per_node, topology.gpus_per_domain
    made_of = ", ".join(GPUS[name].device_kind for name in machine.gpu_names)
    wrong = ", ".join(sorted({kind for kind in facts.gpu_kinds if card_of(kind, machine.gpu_names) is None}))
    return [
        (wrong, f"{machine.name} is made of {made_of}; here are {wrong}", "--mesh local"),
        (machine.layout.num_devices > node > facts.gpus,
         f"a node of {machine.name} has {node} GPUs, here {facts.gpus} are visible",
         "ask the launcher for all GPUs of the node; see docs/clusters.md"),
        (topology.num_nodes > 1 and domain > node and not facts.imex,
         "no channel in /dev/nvidia-caps-imex-channels: NVLink does not reach the other trays",
         "start nvidia-imex on every tray, or ask for a ComputeDomain in Kubernetes; see docs/clusters.md"),
        (topology.num_domains > 1 and not facts.infiniband,
         "no InfiniBand adapter in /sys/class/infiniband: messages between nodes would go over TCP",
         "give the container /dev/infiniband and the host's network; see docs/clusters.md"),
    ]
# fmt: on


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a preset fits this machine."""

    preset: str
    layout: str
    weight_bytes: int
    """Of Kimi K2.6 on each device, bfloat16 and INT4."""
    runs: str
    """`on its GPUs`, `simulated`, or why not."""


def fits(facts: Facts, machines: Mapping[str, Preset] = PRESETS) -> list[Fit]:
    """Every machine against this one."""
    from kimi_jax.ledger.models import k26
    from kimi_jax.ledger.step import Step, ledger

    found = []
    for name, machine in machines.items():
        needs = ledger(Step(k26(), machine.layout, requests=1, rows=1, context=1))
        size = round(sum(need.weights for need in needs.values()))
        found.append(Fit(name, str(machine.layout), size, _runs(facts, machine, size)))
    return found


def _runs(facts: Facts, machine: Preset, weight_bytes: int) -> str:
    if not facts.gpu_kinds:
        return "simulated, for the bundled model"
    if not all(card_of(kind, machine.gpu_names) for kind in facts.gpu_kinds):
        return f"made of {', '.join(machine.gpu_names)}"
    needed = machine.layout.num_devices
    if needed > len(facts.gpu_kinds):
        nodes = -(-needed // machine.topology.gpus_per_node)
        per_node = min(needed, machine.topology.gpus_per_node)
        return f"one of {nodes} nodes" if len(facts.gpu_kinds) == per_node else f"needs {needed} GPUs"
    if facts.gpu_bytes is not None and weight_bytes > facts.gpu_bytes:
        return "on its GPUs, for models smaller than K2.6"
    return "on its GPUs"


def operations(
    facts: Facts, machine: Preset, *, requests: int = 1, rows: int = 16, capacity: int = 8192
) -> "list[Pick]":
    """What would serve K2.6's hot operations for such a step on this machine's devices, and why."""
    import jax
    import numpy as np

    from kimi_jax.decoding.kernels import picks
    from kimi_jax.decoding.loading import model_for
    from kimi_jax.ledger.models import k26

    config = k26()
    device = jax.local_devices()[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("device",))
    return picks(
        config, model_for(config, machine.layout).placement, machine.layout, mesh,
        "bfloat16" if facts.gpu_kinds else "float32", requests=requests, rows=rows, capacity=capacity,
    )  # fmt: skip
