"""GPUs and links as plain facts. Bandwidths are one way and per GPU; bytes are bytes, GB is 1e9."""

from collections.abc import Iterable
from dataclasses import dataclass

# Sources, named in the facts below.
AIC = "NVIDIA aiconfigurator 095f58a, systems/*.yaml (Apache-2.0)"
INFERENCEX = "SemiAnalysis InferenceX 77ca49a, gpu-specs.ts"
NVIDIA = "NVIDIA product data sheet"
NVLINK5 = "NVIDIA, Inside Blackwell Ultra: NVLink 5 is 1.8 TB/s both ways, 900 GB/s one way"


@dataclass(frozen=True)
class Link:
    """A connection of one GPU to its peers: `bytes_per_s` is one way and per GPU."""

    name: str
    bytes_per_s: float
    source: str


NVLINK_4 = Link("NVLink 4", 450e9, f"{INFERENCEX}: 900 GB/s both ways")
NVLINK_5 = Link("NVLink 5", 900e9, NVLINK5)
PCIE_5 = Link("PCIe 5 x16", 64e9, "PCI Express 5.0: 32 GT/s on 16 lanes; " + AIC)
INFINIBAND_400 = Link("InfiniBand NDR 400 Gb/s", 50e9, "ConnectX-7, one adapter a GPU; " + AIC)
INFINIBAND_800 = Link("InfiniBand XDR 800 Gb/s", 100e9, "ConnectX-8, one adapter a GPU; " + AIC)


@dataclass(frozen=True)
class GPU:
    """One GPU. FLOP rates are dense. A rate of 0 means the card has no such path.

    `hbm_bytes_per_s` and `hbm_bytes` are what an estimate should use (data sheet and `nvidia-smi` total);
    the `compiler_*` fields are what XLA's target description of the same card holds (OpenXLA's published GPU target
    specifications, a device query of the card).
    """

    name: str
    device_kind: str
    """What jax calls the device, or the beginning of it."""
    compute_capability: tuple[int, int]
    hbm_bytes_per_s: float
    hbm_bytes: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    fp4_flops_per_s: float
    local_link: Link
    """What joins the GPUs of one node or domain: NVLink, or PCIe where the card has none."""
    network_link: Link
    """What joins nodes or racks."""
    source: str
    core_count: int
    l2_bytes: int
    clock_ghz: float
    tensor_clock_ghz: float
    tensor_bf16_ops_per_clock: int
    """Per tensor unit and clock, with four units a core."""
    compiler_hbm_bytes_per_s: int
    compiler_hbm_bytes: int

    @property
    def nvlink_bytes_per_s(self) -> float:
        """NVLink bandwidth one way; 0 for a card on PCIe."""
        return self.local_link.bytes_per_s if self.local_link.name.startswith("NVLink") else 0.0


MIB = 1024 * 1024

# fmt: off
_GPUS = (
    GPU(
        "h100", "NVIDIA H100", (9, 0), hbm_bytes_per_s=3.35e12, hbm_bytes=81_559 * MIB,
        bf16_flops_per_s=989e12, fp8_flops_per_s=1979e12, fp4_flops_per_s=0,
        local_link=NVLINK_4, network_link=INFINIBAND_400,
        source=f"bandwidth, FLOP rates: {AIC}, {INFERENCEX}; capacity: nvidia-smi total of the 80 GB SXM5 card",
        core_count=132, l2_bytes=52428800, clock_ghz=1.98, tensor_clock_ghz=1.83, tensor_bf16_ops_per_clock=512,
        compiler_hbm_bytes_per_s=3352320000000, compiler_hbm_bytes=84942979072,
    ),
    GPU(
        "h200", "NVIDIA H200", (9, 0), hbm_bytes_per_s=4.8e12, hbm_bytes=141e9,
        bf16_flops_per_s=989e12, fp8_flops_per_s=1979e12, fp4_flops_per_s=0,
        local_link=NVLINK_4, network_link=INFINIBAND_400,
        source=f"{AIC}; {INFERENCEX}; capacity: {NVIDIA}",
        core_count=132, l2_bytes=52428800, clock_ghz=1.98, tensor_clock_ghz=1.83, tensor_bf16_ops_per_clock=512,
        compiler_hbm_bytes_per_s=4800000000000, compiler_hbm_bytes=151397597184,
    ),
    GPU(
        "b200", "NVIDIA B200", (10, 0), hbm_bytes_per_s=7.7e12, hbm_bytes=180 * 1024 * MIB,
        bf16_flops_per_s=2250e12, fp8_flops_per_s=4500e12, fp4_flops_per_s=9000e12,
        # The InferenceX cluster has 400 Gb/s adapters, aiconfigurator's has 800: the slower one is assumed.
        local_link=NVLINK_5, network_link=INFINIBAND_400,
        source=f"{AIC}; {INFERENCEX}",
        core_count=148, l2_bytes=132644864, clock_ghz=1.965, tensor_clock_ghz=1.835, tensor_bf16_ops_per_clock=1024,
        compiler_hbm_bytes_per_s=7672320000000, compiler_hbm_bytes=191514411008,
    ),
    GPU(
        # 62 TB/s for the eight GPUs of an HGX B300; marketing rounds it to 8 TB/s each.
        "b300", "NVIDIA B300", (10, 3), hbm_bytes_per_s=7.75e12, hbm_bytes=275_040 * MIB,
        bf16_flops_per_s=2250e12, fp8_flops_per_s=4500e12, fp4_flops_per_s=13500e12,
        local_link=NVLINK_5, network_link=INFINIBAND_800,
        source=f"{AIC} (7.75 TB/s, 275,040 MiB); {INFERENCEX}",
        # The published target says 158 cores; GB300's says 152 and other sources 148 for this card.
        core_count=158, l2_bytes=135528448, clock_ghz=1.965, tensor_clock_ghz=1.835, tensor_bf16_ops_per_clock=1024,
        compiler_hbm_bytes_per_s=7936000000000, compiler_hbm_bytes=297021865984,
    ),
    GPU(
        "gb200", "NVIDIA GB200", (10, 0), hbm_bytes_per_s=8e12, hbm_bytes=189_471 * MIB,
        bf16_flops_per_s=2500e12, fp8_flops_per_s=5000e12, fp4_flops_per_s=10000e12,
        # Sources differ (400 or 800 Gb/s between racks): the slower one is assumed.
        local_link=NVLINK_5, network_link=INFINIBAND_400,
        source=f"{AIC} (189,471 MiB); {INFERENCEX}",
        core_count=152, l2_bytes=135528448, clock_ghz=2.062, tensor_clock_ghz=1.926, tensor_bf16_ops_per_clock=1024,
        compiler_hbm_bytes_per_s=7928064000000, compiler_hbm_bytes=197897748480,
    ),
    GPU(
        "gb300", "NVIDIA GB300", (10, 3), hbm_bytes_per_s=8e12, hbm_bytes=284_208 * MIB,
        bf16_flops_per_s=2500e12, fp8_flops_per_s=5000e12, fp4_flops_per_s=15000e12,
        local_link=NVLINK_5, network_link=INFINIBAND_800,
        source=f"{AIC} (284,208 MiB); {INFERENCEX}; four ConnectX-8 a tray: NVIDIA NVL72 reference architecture",
        core_count=152, l2_bytes=135528448, clock_ghz=2.07, tensor_clock_ghz=1.933, tensor_bf16_ops_per_clock=1024,
        compiler_hbm_bytes_per_s=7928064000000, compiler_hbm_bytes=297021079552,
    ),
    GPU(
        "rtx-pro-6000", "NVIDIA RTX PRO 6000", (12, 0), hbm_bytes_per_s=1.792e12, hbm_bytes=97_887 * MIB,
        bf16_flops_per_s=468e12, fp8_flops_per_s=936e12, fp4_flops_per_s=1871e12,
        local_link=PCIE_5, network_link=INFINIBAND_400,
        source=f"{AIC} (GDDR7 1.792 TB/s, 97,887 MiB, FLOP rates at 2430 MHz; 400 Gb/s is its placeholder)",
        core_count=188, l2_bytes=134217728, clock_ghz=2.6, tensor_clock_ghz=2.43, tensor_bf16_ops_per_clock=256,
        compiler_hbm_bytes_per_s=1792000000000, compiler_hbm_bytes=103079215104,
    ),
)
# fmt: on

GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in _GPUS}


def card_of(device_kind: str, names: Iterable[str] = GPUS) -> GPU | None:
    """The GPU that jax calls `device_kind`, of those with these names; None for any other."""
    return next((GPUS[name] for name in names if device_kind.startswith(GPUS[name].device_kind)), None)


def gpu(name: str) -> GPU:
    """Look a GPU up by its short name, such as `b300`.

    Raises:
      ValueError: the name is not in the table; the message lists what is.
    """
    key = name.lower()
    if key not in GPUS:
        raise ValueError(f"unknown GPU {name!r}: choose from {', '.join(GPUS)}")
    return GPUS[key]
