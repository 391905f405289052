"""What libraries of kernels cost on each GPU architecture. Times are µs, shares are of the data-sheet rate."""

from dataclasses import dataclass

from kimi_jax.ledger.constants import AIC, Kind


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
_FP8_HOPPER = ExpertKernels(30, 30, 0, 0.7, 0.5, 0, "assumed", "FP8 grouped matmul; no public table was at hand")
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

_DESIGN = "design target of this project's kernels; nothing measured"
_TARGET = Kernels(
    "target",
    AttentionKernels(15, 0.45, 0.8, 0.6, "assumed", _DESIGN),
    ExpertKernels(10, 12, 0.05, 0.75, 0.4, 1, "assumed", _DESIGN),
    Overheads(4, 50, 15, 50, "assumed", _DESIGN),
)

KERNELS: dict[tuple[str, str], Kernels] = {
    ("public", "hopper"): Kernels("public", _MLA_HOPPER, _MARLIN_SGLANG_HOPPER, _PUBLIC),
    ("public", "blackwell"): Kernels("public", _MLA_BLACKWELL, _TRTLLM_BLACKWELL, _PUBLIC),
    ("public", "pcie"): Kernels("public", _MLA_BLACKWELL, _MARLIN_PCIE, _PUBLIC),
    ("target", "hopper"): _TARGET,
    ("target", "blackwell"): _TARGET,
    ("target", "pcie"): _TARGET,
    ("vllm", "hopper"): Kernels("vllm", _MLA_HOPPER, _MARLIN_HOPPER, _VLLM),
    ("vllm", "blackwell"): Kernels("vllm", _MLA_BLACKWELL_VLLM, _MARLIN_BLACKWELL, _VLLM),
    # The wide expert-parallel systems of `published.py`. Nothing here was chosen with those points in view.
    ("sglang", "hopper"): Kernels("sglang", _MLA_HOPPER, _FP8_HOPPER, _SGLANG),
    ("sglang", "blackwell"): Kernels("sglang", _MLA_BLACKWELL_VLLM, _NVFP4_BLACKWELL, _SGLANG),
}

_ARCHITECTURES = {"h100": "hopper", "h200": "hopper", "rtx-pro-6000": "pcie"}


def kernels(name: str, gpu_name: str) -> Kernels:
    """Look up a library's kernels on a GPU: `public` (the best measured), `vllm`, or `target` (ours, as designed).

    Raises:
        ValueError: unknown name, or nothing known for this GPU; the message lists what there is.
    """
    architecture = _ARCHITECTURES.get(gpu_name, "blackwell")
    if (name, architecture) not in KERNELS:
        known = ", ".join(sorted({library for library, arch in KERNELS if arch == architecture}))
        raise ValueError(f"no kernels {name!r} for {gpu_name}: choose from {known}")
    return KERNELS[name, architecture]
