"""Every constant of the estimator, with its unit, where it comes from and how sure that is."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["measured", "derived", "calibrated", "assumed"]
"""measured: read in a published table. derived: fitted here to published kernel or collective tables.
calibrated: chosen with the calibration points of `published.py` in view. assumed: nothing public says so."""

AIC = "NVIDIA aiconfigurator 095f58a measured tables"


def _constant(value: float, unit: str, kind: Kind, source: str) -> Any:
    return dataclasses.field(default=value, metadata={"unit": unit, "kind": kind, "source": source})


@dataclass(frozen=True)
class Constants:
    """What is the same for every machine and every kernel library."""

    dense_bandwidth_fraction: float = _constant(
        0.82, "of HBM", "derived", f"{AIC}: bfloat16 GEMM of at most 64 rows, B300 65536×7168 in 143 µs, H200 alike"
    )
    elementwise_bytes_per_row: float = _constant(
        114_688, "B/row/layer", "derived", "two residual adds with norms: 2 × 4 passes over 7168 bfloat16 values"
    )
    router_us: float = _constant(5, "µs/layer", "assumed", "one small GEMM and a top-k; in-graph kernels are 2–5 µs")
    head_us: float = _constant(20, "µs/step", "assumed", "logits, argmax or sampling and their gather over tp")
    zipf_offset: float = _constant(
        150, "ranks", "calibrated", "expert popularity 1/(rank + offset); 0.96 of the uniform count at 32–64 rows"
    )
    tree_diversity: float = _constant(
        1, "of rows", "assumed", "tree rows route independently: an upper bound; no public measurement on trees"
    )
    hit_rate: float = _constant(
        0.8507, "chance", "measured",
        "z-lab/Kimi-K2.5-DFlash card, block 8: accepted 5.3 (GSM8K), 5.5 (MATH500), 5.3 (HumanEval), 4.5 (MBPP), 3.7"
        " (MT-Bench), mean 4.86; the constant rate whose chain is that long. K2.6's own drafter is a preview",
    )  # fmt: skip
    unsure_rate: float = _constant(
        0.3, "chance", "calibrated",
        "first candidate's hit rate where the drafter is unsure: block 16, chain to DDTree budget 16, Qwen3-4B"
        " 6.25 → 7.03 and Qwen3-8B 6.12 → 6.91 (Domino-Tree tables, temperature 0)",
    )  # fmt: skip
    sibling_share: float = _constant(0.5, "of misses", "calibrated", "same points: a miss caught by the next candidate")
    after_sibling: float = _constant(
        0.5, "of hit rate", "calibrated", "same points; vllm-ddtree measured 22 % below siblings against 65–84 %"
    )
    imbalance_with_eplb: float = _constant(
        1.11, "max/mean", "measured", "DeepSeek-R1 EP32 with EPLB, NVIDIA TensorRT-LLM blog 4 (wide EP)"
    )
    imbalance_without_eplb: float = _constant(
        2.56, "max/mean", "measured", "DeepSeek-R1 EP32 without EPLB, same source; grows as the root of ranks"
    )
    reserve_bytes: float = _constant(
        3.9e9, "B/GPU", "measured", "aiconfigurator systems/*.yaml: NCCL 0.4 GB and 3.5 GB other"
    )
    prefill_tokens_per_s_hopper: float = _constant(
        2_125, "tokens/s/GPU", "calibrated", "17k tokens/s for 8 × H200, K2.5 INT4, points 1"
    )
    prefill_tokens_per_s_blackwell: float = _constant(
        5_625, "tokens/s/GPU", "calibrated", "45k tokens/s for 8 × B200 or B300, K2.5 INT4, points 2 and 3"
    )
    # Collectives.
    domain_hop_us: float = _constant(
        3, "µs/doubling", "derived",
        "NVLink beyond one node, each doubling: GB200 8 GPUs over 2 trays 10.9 µs fused (tokenspeed PR 860) against"
        " 5.4 µs on HGX; extrapolated for 16–72 GPUs, where no all-reduce latency is public",
    )  # fmt: skip
    nvls_us: float = _constant(24, "µs", "derived", "GB300 TP16 8 MiB 36.9 µs (vllm PR 53318); NCCL tuning.cc has 25")
    nvls_bandwidth_fraction: float = _constant(0.74, "of NVLink", "measured", "NCCL tuning.cc, NVLS on Blackwell")
    nccl_base_us: float = _constant(6.7, "µs", "measured", "NCCL tuning.cc base latency, LL ring and tree")
    nccl_local_hop_us: float = _constant(0.6, "µs/hop", "measured", "NCCL tuning.cc, NVLink LL")
    nccl_tree_network_hop_us: float = _constant(
        5, "µs/hop", "measured", "NCCL tuning.cc, network tree LL (25 µs for 2 × 8; one poorly tuned cluster had 62)"
    )
    nccl_ring_network_hop_us: float = _constant(2.7, "µs/hop", "measured", "NCCL tuning.cc, network ring LL")
    nccl_bandwidth_fraction: float = _constant(
        0.75, "of link", "derived", f"{AIC}: NCCL 2.29, 8 × B300, large messages"
    )
    network_bandwidth_fraction: float = _constant(
        0.88, "of network", "derived", f"{AIC}: DeepEP low latency over 400 Gb/s, slope of 64–128 tokens, EP16–64"
    )
    network_dispatch_us: float = _constant(22, "µs", "measured", f"{AIC}: DeepEP low latency EP16, 2–8 tokens")
    network_combine_us: float = _constant(26, "µs", "measured", f"{AIC}: DeepEP low latency EP16, 2 tokens")
    network_exchange_hop_us: float = _constant(
        5.5, "µs/doubling", "measured", f"{AIC}: dispatch and combine, EP16 → EP32 → EP64"
    )
    exchange_hop_us: float = _constant(
        3, "µs/doubling", "measured", f"{AIC}: GB200 one-sided NVLink dispatch and combine, EP8 → EP32"
    )
    exchange_bandwidth_loss: float = _constant(
        0.05, "/doubling", "derived", f"{AIC}: NVLink exchange 753 GB/s at EP8 → 588 GB/s at EP64"
    )


@dataclass(frozen=True)
class LinkConstants:
    """How collective kernels use one kind of local link: latencies and shares of its bandwidth."""

    one_shot_us: float
    one_shot_fraction: float
    two_shot_us: float
    two_shot_fraction: float
    dispatch_us: float
    combine_us: float
    exchange_fraction: float
    nccl_us: float
    source: str


LINKS = {
    "NVLink 5": LinkConstants(
        4.6, 0.65, 14, 0.75, 19, 27, 0.78, 17,
        f"{AIC}: custom all-reduce in CUDA graphs, B200/B300 × 2, 4, 8; exchange: GB200 one-sided NVLink (EP8);"
        " NCCL all-gather 8 × B300",
    ),
    "NVLink 4": LinkConstants(
        2.7, 0.57, 9, 0.84, 13.5, 12.5, 0.6, 12.5,
        f"{AIC}: custom all-reduce in CUDA graphs, H100/H200 × 2, 4, 8; exchange: DeepEP low latency 8 × H200;"
        " NCCL all-gather 8 × H200",
    ),
    "PCIe 5 x16": LinkConstants(
        26, 0.6, 60, 0.38, 26, 26, 0.3, 15,
        f"{AIC}: all-reduce and all-to-all, RTX PRO 6000 × 8",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Kernels:
    """What a library of kernels costs on one GPU architecture. Times are µs, shares are of the data-sheet rate."""

    name: str
    attention_us: float
    """One layer's attention beside weights, cache and arithmetic: launches, norms, rope, small GEMMs."""
    dense_flop_fraction: float
    """Of attention projections and other dense matmuls, as measured on whole attention modules."""
    cache_bandwidth_fraction: float
    cache_flop_fraction: float
    experts_us: float
    """One layer's routed experts beside weights and arithmetic."""
    experts_floor_us: float
    """The least one layer's routed experts take."""
    distinct_expert_us: float
    """For each expert read: narrow experts stream worse."""
    experts_bandwidth_fraction: float
    experts_flop_fraction: float
    extra_experts: float
    """Experts' worth of bandwidth lost where a rank holds few whole experts (expert parallelism)."""
    launch_us: float
    """Small kernels of one layer that no other part counts."""
    host_us: float
    """Host and scheduling time of one step that the GPU waits for."""
    drafter_layer_us: float
    tree_us: float
    """Building the tree, accepting a path and committing it, once a step."""
    kind: Kind
    source: str


_ARCHITECTURES = {"h100": "hopper", "h200": "hopper", "rtx-pro-6000": "pcie"}
_DRAFT = {"drafter_layer_us": 25.0, "tree_us": 150.0}
_DRAFT_SOURCE = "drafter layer and tree: assumed, one attention module a layer and a device-resident tree"

_MARLIN_HOPPER = {
    "experts_us": 25.0, "experts_floor_us": 26.0, "distinct_expert_us": 0.25, "experts_bandwidth_fraction": 0.84,
    "experts_flop_fraction": 0.4, "extra_experts": 2.0,
}  # fmt: skip
_TRTLLM_BLACKWELL = {
    "experts_us": 25.0, "experts_floor_us": 36.0, "distinct_expert_us": 0.07, "experts_bandwidth_fraction": 0.58,
    "experts_flop_fraction": 0.25, "extra_experts": 2.0,
}  # fmt: skip
_ATTENTION_HOPPER = {
    "attention_us": 30.0, "dense_flop_fraction": 0.35, "cache_bandwidth_fraction": 0.9, "cache_flop_fraction": 0.6,
}  # fmt: skip
_ATTENTION_BLACKWELL = {
    "attention_us": 28.0, "dense_flop_fraction": 0.35, "cache_bandwidth_fraction": 0.7, "cache_flop_fraction": 0.5,
}  # fmt: skip

KERNELS: dict[tuple[str, str], Kernels] = {
    ("public", "hopper"): Kernels(
        name="public", **_ATTENTION_HOPPER, **_MARLIN_HOPPER, launch_us=8, host_us=400, **_DRAFT, kind="derived",
        source=f"{AIC}: INT4 Marlin (SGLang 0.5.14), MLA module (vLLM 0.24); attention and launch floor as"
        f" calibrated for vLLM; host 0.4 ms assumed; {_DRAFT_SOURCE}",
    ),
    ("public", "blackwell"): Kernels(
        name="public", **_ATTENTION_BLACKWELL, **_TRTLLM_BLACKWELL, launch_us=8, host_us=400, **_DRAFT, kind="derived",
        source=f"{AIC}: INT4 TRT-LLM generation kernel (SGLang 0.5.14), MLA module (TensorRT-LLM); launch as"
        f" calibrated for vLLM; host 0.4 ms assumed; {_DRAFT_SOURCE}",
    ),
    ("public", "pcie"): Kernels(
        name="public", **_ATTENTION_BLACKWELL,
        experts_us=6, experts_floor_us=35, distinct_expert_us=0.17, experts_bandwidth_fraction=0.94,
        experts_flop_fraction=0.4, extra_experts=4, launch_us=8, host_us=400, **_DRAFT, kind="derived",
        source=f"{AIC}: INT4 Marlin on RTX PRO 6000; attention as on B300; host 0.4 ms assumed; {_DRAFT_SOURCE}",
    ),
    ("vllm", "hopper"): Kernels(
        name="vllm", **_ATTENTION_HOPPER,
        experts_us=35, experts_floor_us=41, distinct_expert_us=0.25, experts_bandwidth_fraction=0.8,
        experts_flop_fraction=0.3, extra_experts=2, launch_us=8, host_us=800, **_DRAFT, kind="calibrated",
        source=f"experts: {AIC}, INT4 Marlin (vLLM 0.24); attention, launch and host: calibration points 1",
    ),
    ("vllm", "blackwell"): Kernels(
        name="vllm", **(_ATTENTION_BLACKWELL | {"attention_us": 30.0}),
        experts_us=35, experts_floor_us=42, distinct_expert_us=0.25, experts_bandwidth_fraction=0.6,
        experts_flop_fraction=0.18, extra_experts=6, launch_us=8, host_us=800, **_DRAFT, kind="calibrated",
        source=f"experts: {AIC}, INT4 Marlin (vLLM 0.24); attention, launch and host: calibration points 2 and 3",
    ),
}  # fmt: skip

# The wide expert-parallel systems of `published.py`. Nothing here was chosen with those points in view.
_SGLANG = {"launch_us": 30.0, "host_us": 2000.0} | _DRAFT
_SGLANG_SOURCE = (
    "attention: as for vLLM; FP8 experts at 0.7 and NVFP4 experts at 0.88 of HBM (the latter: "
    + AIC + "); arithmetic at half the peak, launch 30 µs a layer and host 2 ms a step assumed"
)  # fmt: skip
for _architecture, _attention, _experts in (
    ("hopper", _ATTENTION_HOPPER, {"experts_us": 30.0, "experts_floor_us": 30.0, "experts_bandwidth_fraction": 0.7}),
    (
        "blackwell",
        _ATTENTION_BLACKWELL | {"attention_us": 30.0},
        {"experts_us": 19.0, "experts_floor_us": 19.0, "experts_bandwidth_fraction": 0.88},
    ),
):
    KERNELS["sglang", _architecture] = Kernels(
        name="sglang", **_attention, **_experts, distinct_expert_us=0, experts_flop_fraction=0.5, extra_experts=0,
        **_SGLANG, kind="assumed", source=_SGLANG_SOURCE,
    )  # fmt: skip

# This project's own kernels as they are meant to be: nothing here has been measured.
for _architecture in ("hopper", "blackwell", "pcie"):
    KERNELS["target", _architecture] = Kernels(
        name="target",
        attention_us=15, dense_flop_fraction=0.45, cache_bandwidth_fraction=0.8, cache_flop_fraction=0.6,
        experts_us=10, experts_floor_us=12, distinct_expert_us=0.05, experts_bandwidth_fraction=0.75,
        experts_flop_fraction=0.4, extra_experts=1, launch_us=4, host_us=50, drafter_layer_us=15, tree_us=50,
        kind="assumed", source="design targets of this project's kernels; nothing measured",
    )  # fmt: skip


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
