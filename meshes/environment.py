"""What to set in the environment before starting on a machine: XLA flags and settings of NCCL and jax, with reasons."""

from dataclasses import dataclass

from meshes.presets import Preset


@dataclass(frozen=True)
class Setting:
    """One XLA flag (`--xla_…`) or one environment variable, its value and why."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"

    @property
    def is_xla_flag(self) -> bool:
        """Whether it belongs into XLA_FLAGS."""
        return self.name.startswith("--")


# fmt: off
_EVERYWHERE = (
    Setting("--xla_gpu_enable_latency_hiding_scheduler", "true",
            "runs what does not depend on a message (the shared expert, the router) while it travels"),
    Setting("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92",
            "weights and caches fill the GPU; the rest is for NCCL (about 0.4 GB), CUDA modules and libraries, outside "
            "jax's pool"),
)
_ONE_SHOT = Setting("--xla_gpu_experimental_use_collective_kernels", "ALL_REDUCE",
                    "sums over tp in one kernel instead of NCCL's ring (5 against 26 µs for 16 kB on eight B300, as "
                    "published); only among GPUs of one process, so start one process a node")
_ONE_SHOT_ACROSS_HOSTS = Setting("--xla_gpu_unsupported_use_cross_host_one_shot_kernel", "ALLREDUCE",
                                 "the same where tp spans several trays of an NVLink domain; XLA itself calls it "
                                 "unsupported, so drop it at the first doubt")
_SEVERAL_PROCESSES = (
    Setting("--xla_gpu_nccl_terminate_on_error", "true",
            "a broken connection ends the process instead of leaving it waiting"),
    Setting("NCCL_DEBUG", "WARN", "NCCL says why it fails; on standard error, since decode.py keeps standard output"),
)
_NVLINK_ACROSS_NODES = (
    Setting("NCCL_MNNVL_ENABLE", "1",
            "fails at the start where NVLink between trays does not work (nvidia-imex not running), instead of "
            "decoding over the network"),
    Setting("NCCL_CUMEM_ENABLE", "1", "allocates with CUDA's virtual memory, which NVLink between trays needs"),
)
# fmt: on


def settings(machine: Preset) -> tuple[Setting, ...]:
    """What to set for a machine and its layout, XLA's flags first.

    Nothing here changes results beyond rounding. None of it has been timed by this project.
    """
    topology, layout = machine.topology, machine.layout
    chosen = [*_EVERYWHERE]
    if layout.tp > 1:
        across = layout.tp > topology.gpus_per_node and topology.gpus_per_domain > topology.gpus_per_node
        chosen += [_ONE_SHOT, *([_ONE_SHOT_ACROSS_HOSTS] if across else [])]
    if topology.num_nodes > 1 and layout.num_devices > topology.gpus_per_node:
        chosen += _SEVERAL_PROCESSES
        if topology.gpus_per_domain > topology.gpus_per_node:
            chosen += _NVLINK_ACROSS_NODES
    return tuple(sorted(chosen, key=lambda setting: not setting.is_xla_flag))


def exports(machine: Preset) -> list[str]:
    """Lines for a shell. XLA_FLAGS that are set already are kept."""
    flags = " ".join(str(setting) for setting in settings(machine) if setting.is_xla_flag)
    variables = [f"export {setting}" for setting in settings(machine) if not setting.is_xla_flag]
    return [f'export XLA_FLAGS="{flags} ${{XLA_FLAGS-}}"', *variables]
