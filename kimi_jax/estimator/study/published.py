"""Published speeds of whole systems, and what the model says about them.

Calibration points were in view when constants were chosen. Held-out points were not, and never are: when the model
misses one, that is the finding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from kimi_jax.estimator import step
from kimi_jax.estimator.acceptance import Acceptance, rate_for_length
from kimi_jax.estimator.scenario import Prefill, default_acceptance, make_scenario
from kimi_jax.estimator.search import ERROR_BAND
from kimi_jax.estimator.step import Estimate
from kimi_jax.ledger.models import k26
from kimi_jax.ledger.precision import NVFP4_BITS, PRECISIONS, Precision
from meshes import Layout, Preset, Topology, gpu
from meshes.presets import CacheSplit, ExpertSplit

OVERLAP = 0.0
"""Of communication with computation, for every point alike. The wide systems did overlap two half batches."""

NO_DRAFT = Acceptance((((0.0,),),), "no draft")

DEEPSEEK_V3 = replace(k26(), num_attention_heads=128, n_routed_experts=256, first_k_dense_replace=3, vocab_size=129280)
FP8 = PRECISIONS["fp8"]
NVFP4 = replace(PRECISIONS["nvfp4"], cache_bytes=1)
FP8_CACHE = Precision(cache_bytes=1)
WIDE_NVFP4 = replace(FP8, expert_bits=NVFP4_BITS, shared_bits=NVFP4_BITS, cache_bytes=1, dispatch_bytes=0.5625,
                     expert_arithmetic="fp4")  # fmt: skip


Role = Literal["calibration", "held-out"]
Family = Literal["single-node", "wide-ep", "pcie", "prefill", "tp-network"]
"""`tp-network`, tensor parallelism over a network, has one public machine and so no band."""


@dataclass(frozen=True)
class Point:
    """One published measurement: tokens per second for a user, or another of `per`."""

    name: str
    role: Role
    family: Family
    published: float
    source: str
    estimate: Callable[[], Estimate]
    per: Literal["user", "gpu", "system", "prompt"] = "user"

    @property
    def predicted(self) -> float:
        """What the model says, in the same unit."""
        e = self.estimate()
        return {
            "user": e.tokens_per_s_per_user,
            "gpu": e.tokens_per_s_per_gpu,
            "system": e.tokens_per_s,
            "prompt": 1e3 * e.scenario.chunk / e.step_ms,
        }[self.per]

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted / self.published - 1


VLLM_CHUNK = 8192
"""Prompt tokens that vLLM's server runs in a step by default on GPUs of this size."""

CAPACITY_REPORT = "kimi-capacity-report, quoting InferenceX (recipe kimik2.5_int4_*.sh)"
RTX6K_PAGE = "local-inference-lab/rtx6kpro models/kimi-k26-v4.md, vLLM, FP8 cache"
COMPARE_PAGE = "InferenceX compare page, interpolated; concurrency from tokens/s/GPU × 8 / 2 / interactivity"


def _node(
    card: str, concurrency: int, context: int, *, gpus: int = 8, experts: ExpertSplit = "width",
    cache: CacheSplit = "copied", library: str = "vllm", **options: Any,
) -> Callable[[], Estimate]:  # fmt: skip
    """One tp group without a draft, over nodes of at most 8 GPUs."""
    layout = Layout(tp=gpus, experts=experts, cache=cache)

    def run() -> Estimate:
        return step.estimate(
            make_scenario(
                Preset(f"{gpus} × {card}", Topology(gpus, min(gpus, 8), min(gpus, 8)), layout, (card,)), gpu(card),
                concurrency=concurrency, context=context, acceptance=NO_DRAFT, overlap=OVERLAP,
                kernel_library=library, **options,
            )
        )  # fmt: skip

    return run


def _mixed(card: str, concurrency: int, input_tokens: int, output_tokens: int = 1024, **options: Any):
    """The same with prompts that arrive as requests end."""
    prompts = Prefill(input_tokens, output_tokens, VLLM_CHUNK)
    return _node(card, concurrency, input_tokens + output_tokens // 2, prefill=prompts, **options)


def _wide(card: str, gpus: int, per_gpu: int, context: int, slots: int, node: int, domain: int, **options: Any):
    """Attention data-parallel, experts over all GPUs, dispatch and combine."""

    def run() -> Estimate:
        layout = Layout(ep=gpus, exchange="alltoall")
        return step.estimate(
            make_scenario(
                Preset(f"{gpus} × {card}", Topology(gpus, node, domain), layout, (card,)), gpu(card),
                concurrency=per_gpu * gpus, context=context, acceptance=NO_DRAFT, kernel_library="sglang",
                physical_slots=slots, overlap=OVERLAP, **options,
            )
        )  # fmt: skip

    return run


_K25 = {
    "h200": (91.2, 70.3, 46.6, 28.9, 16.7),
    "b200": (104.4, 81.1, 59.2, 40.5, 26.0),
    "b300": (111.1, 84.4, 60.6, 42.0, 26.8),
}
_K25_SHORT = {"b300": ((8, 92), (16, 73), (30, 54)), "b200": ((7, 91), (12, 73), (25, 55))}

POINTS: tuple[Point, ...] = (
    *(
        Point(f"K2.5 INT4, 8 × {card} TP8, 8k/1k, C={c}", "calibration", "single-node", value, CAPACITY_REPORT,
              _mixed(card, c, 8192))
        for card, values in _K25.items()
        for c, value in zip((4, 8, 16, 32, 64), values, strict=True)
    ),
    *(
        Point(f"K2.5 INT4, 8 × {card} TP8, 1k/1k, C≈{c}", "held-out", "single-node", value, COMPARE_PAGE,
              _mixed(card, c, 1024))
        for card, values in _K25_SHORT.items()
        for c, value in values
    ),
    Point("K2 FP8, 96 × H200 EP96, 480 requests a GPU", "held-out", "wide-ep", 3000,
          "LMSYS blog 2025-07-20: 288k tokens/s, 96 redundant experts",
          _wide("h200", 96, 480, 2050, 480, 8, 8, precision=FP8), "gpu"),
    Point("DeepSeek-V3 FP8, 72 × H100 EP72, 256 requests a GPU", "held-out", "wide-ep", 2785,
          "LMSYS blog 2025-05-05: 22,282 tokens/s a node, 32 redundant experts, two-batch overlap",
          _wide("h100", 72, 256, 2050, 288, 8, 8, precision=FP8, model=DEEPSEEK_V3), "gpu"),
    Point("DeepSeek-V3 FP8, 72 × H100 EP72, 128 requests a GPU, no overlap", "held-out", "wide-ep", 12929 / 8,
          "LMSYS blog 2025-05-05: 12,929 tokens/s a node without two-batch overlap",
          _wide("h100", 72, 128, 2050, 288, 8, 8, precision=FP8, model=DEEPSEEK_V3), "gpu"),
    Point("DeepSeek-V3 FP8, H800 EP128, 128 requests a GPU, 4k", "held-out", "wide-ep", 18598 / 8,
          "DeepSeek profile data quoted by LMSYS 2025-05-05: 18,598 tokens/s a node (H800 taken as H100)",
          _wide("h100", 128, 128, 4096, 256, 8, 8, precision=FP8, model=DEEPSEEK_V3), "gpu"),
    Point("DeepSeek FP8 attention, NVFP4 experts, 48 × GB200 EP48, 1408 a GPU", "held-out", "wide-ep", 13386,
          "LMSYS blog 2025-09-25",
          _wide("gb200", 48, 1408, 2050, 288, 4, 48, precision=WIDE_NVFP4, model=DEEPSEEK_V3), "gpu"),
    Point("DeepSeek FP8 attention, NVFP4 experts, 48 × GB200 EP48, 768 a GPU", "held-out", "wide-ep", 12050,
          "LMSYS blog 2025-09-25: 10 % below the point above",
          _wide("gb200", 48, 768, 2050, 288, 4, 48, precision=WIDE_NVFP4, model=DEEPSEEK_V3), "gpu"),
    *(
        Point(f"K2.6 INT4, 8 × RTX PRO 6000 TP8, short, C={c}", "calibration", "pcie", value, RTX6K_PAGE,
              _node("rtx-pro-6000", c, 1024, precision=FP8_CACHE), "system")
        for c, value in ((1, 92.4), (4, 239.5), (16, 636.2), (64, 1497.3))
    ),
    *(
        Point(f"K2.6 INT4, 8 × RTX PRO 6000 TP8, {context // 1024}k, C=1", "calibration", "pcie", value, RTX6K_PAGE,
              _node("rtx-pro-6000", 1, context, precision=FP8_CACHE))
        for context, value in ((16384, 81.5), (65536, 60.5))
    ),
    Point("K2.6 INT4, 8 × RTX PRO 6000 TP8, 128k, split cache", "calibration", "pcie", 61.3, RTX6K_PAGE,
          _node("rtx-pro-6000", 1, 131072, precision=FP8_CACHE, cache="split")),
    *(
        Point(f"DeepSeek-R1 NVFP4, 4 × B300 TP4 EP4, 1k/1k, C={c}", "held-out", "single-node", 1e3 / ms,
              "InferenceX pull request 3183, SGLang 0.5.12, 1000 / TPOT",
              _mixed("b300", c, 1024, gpus=4, experts="slots", precision=NVFP4, model=DEEPSEEK_V3))
        for c, ms in ((1, 5.94), (4, 7.72), (16, 11.5))
    ),
    Point("DeepSeek-R1 FP8, 8 × H200 TP8, 1k/8k, C=4", "held-out", "single-node", 1e3 / 10.93,
          "InferenceX issue 870, SGLang 0.5.7, 1000 / TPOT",
          _mixed("h200", 4, 1024, 8192, precision=FP8, model=DEEPSEEK_V3)),
    Point("DeepSeek-R1 FP8, 8 × H200 TP8, 1k/1k, C=16", "held-out", "single-node", 1e3 / 17.2,
          "InferenceX issue 870, SGLang 0.5.7, 1000 / TPOT",
          _mixed("h200", 16, 1024, precision=FP8, model=DEEPSEEK_V3)),
    Point("DeepSeek-R1 FP8, 16 × H100 TP16 over InfiniBand, C=1", "held-out", "tp-network", 1e3 / 23.2,
          "tt-inference-server issue 356, SGLang of mid-2025, 1000 / TPOT",
          _node("h100", 1, 640, gpus=16, precision=FP8, model=DEEPSEEK_V3)),
    Point("K2-Thinking INT4, 8 × B200 TP8, prefill", "held-out", "prefill", 43e3,
          "SGLang issue 18136: 41 to 45 thousand tokens/s with TensorRT-LLM's MXINT4 kernel",
          _node("b200", 0, 1, chunk=VLLM_CHUNK, chunk_context=4096, library="public"), "prompt"),
    Point("K2.6 INT4, 8 × RTX PRO 6000 TP8, prefill", "calibration", "prefill", 8 * 910, RTX6K_PAGE,
          _node("rtx-pro-6000", 0, 1, chunk=VLLM_CHUNK, chunk_context=4096, precision=FP8_CACHE), "prompt"),
)  # fmt: skip


@dataclass(frozen=True)
class AcceptancePoint:
    """A drafter measured as a chain and as a tree: tokens a round."""

    name: str
    role: Role
    block_size: int
    chain: float
    budget: int
    published: float
    source: str

    @property
    def predicted(self) -> float:
        """Tree length that the model makes of the chain's."""
        rate = rate_for_length(self.chain, self.block_size)
        return default_acceptance(self.block_size, rate).length(self.budget)

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted / self.published - 1


DOMINO = "Domino-Tree results/tables_gpunative: DFlash and DDTree@16, same drafter"

ACCEPTANCE_BAND = 0.10
ACCEPTANCE_POINTS = (
    AcceptancePoint("Qwen3-4B, block 16, T=0", "calibration", 16, 6.25, 16, 7.03, DOMINO),
    AcceptancePoint("Qwen3-8B, block 16, T=0", "calibration", 16, 6.12, 16, 6.91, DOMINO),
    AcceptancePoint("Qwen3-4B, block 16, T=1", "held-out", 16, 5.39, 16, 6.30, DOMINO),
    AcceptancePoint("Qwen3-8B, block 16, T=1", "held-out", 16, 5.24, 16, 6.12, DOMINO),
    AcceptancePoint("dtree-mlx, block 16, budget 24", "held-out", 16, 5.71, 24, 7.17, "DrHB/dtree-mlx page"),
)


def compared(role: str) -> Iterator[tuple[str, Point | AcceptancePoint, float | None]]:
    """Every point of a role with its name in a table and the error that the model claims for it, if any."""
    yield from ((p.name, p, ERROR_BAND.get(p.family)) for p in POINTS if p.role == role)
    for a in ACCEPTANCE_POINTS:
        if a.role == role:
            yield f"tokens a round: {a.name}, budget {a.budget}", a, ACCEPTANCE_BAND
