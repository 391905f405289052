"""What libraries of kernels cost on each GPU architecture. Times are µs, shares are of the data-sheet rate."""

from dataclasses import dataclass, replace

from kimi_jax.ledger.constants import AIC, Kind
from kimi_jax.ledger.precision import Format


@dataclass(frozen=True)
class AttentionKernels:
    """One layer's attention and the dense matmuls."""

    us: float
    """Beside weights, cache and arithmetic: launches, norms, rope, small matmuls."""
    dense_flop_fraction: float
    """Of attention projections and other dense matmuls, as measured on whole attention modules."""
    cache_bandwidth_fraction: float
    cache_flop_fraction: float
    kind: Kind
    source: str
    expands_prompts: bool = True
    """Whether a prompt's keys and values are expanded for its attention; with absorbed projections each score costs
    3.4 times as much."""


@dataclass(frozen=True)
class ExpertKernels:
    """One layer's routed experts."""

    us: float
    """Beside weights and arithmetic."""
    floor_us: float
    """The least that a layer takes."""
    distinct_expert_us: float
    """For each expert read: narrow experts stream worse."""
    bandwidth_fraction: float
    flop_fraction: float
    extra_experts: float
    """Experts' worth of bandwidth lost where a rank holds few whole experts (expert parallelism)."""
    kind: Kind
    source: str


@dataclass(frozen=True)
class Overheads:
    """What no part's own arithmetic explains."""

    launch_us: float
    """Small kernels of one layer that no other part counts."""
    host_us: float
    """Host and scheduling time of one step that the GPU waits for."""
    drafter_layer_us: float
    tree_us: float
    """Building the tree, accepting a path and committing it, once a step."""
    kind: Kind
    source: str
    collective_us: float = 0.0
    """The host's launch of a collective, where no graph holds it."""
    has_own_exchange: bool = False
    """Whether rows go to their experts as this program's exchanges send them, not as the best public kernels do."""


@dataclass(frozen=True)
class Kernels:
    """One library on one architecture."""

    name: str
    attention: AttentionKernels
    experts: ExpertKernels
    overheads: Overheads


_MLA_HOPPER = AttentionKernels(
    30, 0.35, 0.9, 0.6, "calibrated",
    f"shares: {AIC}, MLA module (vLLM 0.24) on H200; 30 µs: calibration points 1 (that module alone takes 80)",
)  # fmt: skip
_MLA_BLACKWELL = AttentionKernels(
    28, 0.35, 0.7, 0.5, "derived", f"{AIC}: MLA module (TensorRT-LLM) on B300, 8 to 64 heads, batch 1 to 1024"
)
_MLA_BLACKWELL_VLLM = AttentionKernels(
    30, 0.35, 0.7, 0.5, "calibrated", f"shares: as TensorRT-LLM ({AIC}); 30 µs: calibration points 2 and 3"
)
_MLA_PCIE = AttentionKernels(
    28, 0.35, 0.45, 0.5, "calibrated", "K2.6 on 8 × RTX PRO 6000, 1k to 128k cached; the rest as TensorRT-LLM on B300"
)
_MARLIN_SGLANG_HOPPER = ExpertKernels(
    25, 26, 0.25, 0.84, 0.4, 2, "derived", f"{AIC}: INT4 Marlin (SGLang 0.5.14), 384 experts, H200"
)
_MARLIN_HOPPER = ExpertKernels(
    35, 41, 0.25, 0.8, 0.3, 2, "derived", f"{AIC}: INT4 Marlin (vLLM 0.24), 384 experts, H200, tp 1 to 32"
)
_MARLIN_BLACKWELL = ExpertKernels(
    35, 42, 0.25, 0.6, 0.18, 6, "derived", f"{AIC}: INT4 Marlin (vLLM 0.24), 384 experts, B200 and B300, tp 1 to 32"
)
_MARLIN_PCIE = ExpertKernels(
    6, 35, 0.17, 0.94, 0.4, 4, "derived", f"{AIC}: INT4 Marlin (vLLM 0.24), 384 experts, RTX PRO 6000, from 8 rows"
)
_TRTLLM_BLACKWELL = ExpertKernels(
    25, 36, 0.07, 0.58, 0.25, 2, "derived",
    f"{AIC}: INT4 TensorRT-LLM generation kernel (SGLang 0.5.14), 384 experts, B300 and GB300, tp and ep 1 to 128",
)  # fmt: skip
_FP8 = ExpertKernels(30, 30, 0, 0.7, 0.5, 0, "assumed", "FP8 grouped matmul; no public table was at hand")
_BF16 = ExpertKernels(30, 30, 0, 0.8, 0.5, 0, "assumed", "bfloat16 grouped matmul; no public table was at hand")
_NVFP4_BLACKWELL = ExpertKernels(
    19, 19, 0, 0.88, 0.5, 0, "derived", f"{AIC}: NVFP4 TensorRT-LLM generation kernel, B300; arithmetic assumed"
)

_PUBLIC = Overheads(
    8, 400, 25, 150, "assumed",
    "launch as calibrated for vLLM; host 0.4 ms, one attention module a drafter layer and a tree on the device assumed",
)  # fmt: skip
_VLLM = Overheads(8, 800, 25, 150, "calibrated", "launch and host: calibration points 1 to 3; the drafter's are unused")
_SGLANG = Overheads(
    30, 2000, 25, 150, "assumed",
    "data-parallel engine with host scheduling; start values of an earlier prototype, not changed for any point",
)  # fmt: skip

_PROGRAM = replace(
    _PUBLIC, host_us=50, kind="assumed", has_own_exchange=True,
    source="as public, but rounds follow one another on the device; collectives are launched by the host, as XLA leaves"
    f" them out of its command buffers: what {AIC} adds without CUDA graphs, nothing of it hidden",
)  # fmt: skip
_HOST_LAUNCH_US = {"x86": 15.0, "grace": 40.0}
_GRACE = ("gb200", "gb300")

_DESIGN = "design target of this project's kernels; nothing measured"
_TARGET = ExpertKernels(10, 12, 0.05, 0.75, 0.4, 1, "assumed", _DESIGN)

ATTENTION: dict[tuple[str, str], AttentionKernels] = {
    ("public", "hopper"): _MLA_HOPPER,
    ("public", "blackwell"): _MLA_BLACKWELL,
    ("public", "pcie"): _MLA_PCIE,
    ("vllm", "hopper"): _MLA_HOPPER,
    ("vllm", "blackwell"): _MLA_BLACKWELL_VLLM,
    ("vllm", "pcie"): _MLA_PCIE,
    ("sglang", "hopper"): _MLA_HOPPER,
    ("sglang", "blackwell"): _MLA_BLACKWELL_VLLM,
    ("program", "hopper"): replace(_MLA_HOPPER, expands_prompts=False),
    ("program", "blackwell"): replace(_MLA_BLACKWELL, expands_prompts=False),
    **{
        ("target", architecture): AttentionKernels(15, 0.45, 0.8, 0.6, "assumed", _DESIGN)
        for architecture in ("hopper", "blackwell")
    },
}
"""By library and architecture."""

_OTHER_FORMATS: tuple[tuple[str, Format, ExpertKernels], ...] = (
    ("hopper", "fp8", _FP8),
    ("blackwell", "fp8", _FP8),
    ("blackwell", "nvfp4", _NVFP4_BLACKWELL),
    ("hopper", "bf16", _BF16),
    ("blackwell", "bf16", _BF16),
)
EXPERTS: dict[tuple[str, str, Format], ExpertKernels] = {
    ("public", "hopper", "int4"): _MARLIN_SGLANG_HOPPER,
    ("public", "blackwell", "int4"): _TRTLLM_BLACKWELL,
    ("public", "pcie", "int4"): _MARLIN_PCIE,
    ("vllm", "hopper", "int4"): _MARLIN_HOPPER,
    ("vllm", "blackwell", "int4"): _MARLIN_BLACKWELL,
    ("vllm", "pcie", "int4"): _MARLIN_PCIE,
    ("program", "hopper", "int4"): _MARLIN_SGLANG_HOPPER,
    ("program", "blackwell", "int4"): _TRTLLM_BLACKWELL,
    ("target", "hopper", "int4"): _TARGET,
    ("target", "blackwell", "int4"): _TARGET,
    **{
        (library, architecture, format_): kernels_
        for library in ("public", "vllm", "sglang")
        for architecture, format_, kernels_ in _OTHER_FORMATS
    },
}
"""By library, architecture and what the weights are; FP8 and NVFP4 kernels are the same in all public libraries."""

OVERHEADS = {
    "public": _PUBLIC,
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "program": _PROGRAM,
    "target": Overheads(4, 50, 15, 50, "assumed", _DESIGN),
}

_ARCHITECTURES = {"h100": "hopper", "h200": "hopper", "rtx-pro-6000": "pcie"}


def kernels(name: str, gpu_name: str, experts: Format = "int4") -> Kernels:
    """Look up a library's kernels on a GPU: `public` (the best measured), `vllm`, `sglang`, `program`, or `target`.

    `program` is what this repository's program would do with the best public kernels: its own launches, exchanges and
    absorbed attention to prompts. `target` is what its kernels were designed for.

    Args:
      experts: what the weights of routed experts are.

    Raises:
      ValueError: unknown name, or nothing known for this GPU or these weights; the message lists what there is.
    """
    architecture = _ARCHITECTURES.get(gpu_name, "blackwell")
    key = name, architecture, experts
    if key not in EXPERTS or key[:2] not in ATTENTION:
        libraries = sorted({lib for lib, arch, kind in EXPERTS if (arch, kind) == key[1:] and (lib, arch) in ATTENTION})
        if not libraries:
            formats = ", ".join(sorted({kind for _, arch, kind in EXPERTS if arch == architecture}))
            raise ValueError(f"no kernels for {experts} experts are known on {gpu_name}: take {formats}")
        raise ValueError(f"no kernels {name!r} for {experts} experts on {gpu_name}: choose from {', '.join(libraries)}")
    overheads = OVERHEADS[name]
    if overheads is _PROGRAM:
        overheads = replace(overheads, collective_us=_HOST_LAUNCH_US["grace" if gpu_name in _GRACE else "x86"])
    return Kernels(name, ATTENTION[key[:2]], EXPERTS[key], overheads)
