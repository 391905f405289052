"""Every constant of the rates, with its unit, where it comes from and how sure that is."""

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
    prompt_flop_fraction: float = _constant(
        0.5, "of FLOP/s", "calibrated", "products of thousands of rows; calibration points 1 to 3 in view"
    )
    elementwise_passes: float = _constant(
        8, "passes/layer", "derived", "two residual adds with norms: 2 × 4 passes over a row's bfloat16 values"
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
    nccl_network_us: float = _constant(
        62, "µs", "measured",
        "NCCL, small all-reduce over InfiniBand, 2 × 8 GPUs, the only measurement found; NCCL's own model has 25",
    )  # fmt: skip
    nccl_tree_network_hop_us: float = _constant(5, "µs/hop", "measured", "NCCL tuning.cc, network tree LL")
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
        26, 0.6, 45, 0.5, 26, 26, 0.3, 15,
        f"{AIC}: all-reduce and all-to-all, RTX PRO 6000 × 8; 45 µs and 0.5: between those tables and what K2.6 reaches"
        " on 8 of these cards",
    ),
}  # fmt: skip
