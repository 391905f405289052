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
from kimi_jax.ledger.precision import Precision
from meshes import Layout, Preset, Topology, gpu

OVERLAP = 0.0
"""Of communication with computation, for every point alike. The wide systems did overlap two half batches."""

NO_DRAFT = Acceptance((((0.0,),),), "no draft")

DEEPSEEK_V3 = replace(k26(), num_attention_heads=128, n_routed_experts=256, first_k_dense_replace=3, vocab_size=129280)
# One float32 scale for each 128 × 128 block of FP8.
FP8 = Precision(
    expert_bits=8.002, attention_bits=8.002, shared_bits=8.002, dispatch_bytes=1, expert_arithmetic="fp8",
    dense_arithmetic="fp8",
)  # fmt: skip
NVFP4 = replace(FP8, expert_bits=4.5, shared_bits=4.5, cache_bytes=1, dispatch_bytes=0.5625, expert_arithmetic="fp4")


@dataclass(frozen=True)
class Point:
    """One published measurement: tokens per second for a user (`single-node`) or a GPU (`wide-ep`)."""

    name: str
    role: Literal["calibration", "held-out"]
    family: Literal["single-node", "wide-ep"]
    published: float
    source: str
    estimate: Callable[[], Estimate]

    @property
    def predicted(self) -> float:
        """What the model says, in the same unit."""
        result = self.estimate()
        return result.tokens_per_s_per_user if self.family == "single-node" else result.tokens_per_s_per_gpu

    @property
    def error(self) -> float:
        """Predicted over published, minus 1."""
        return self.predicted / self.published - 1


CAPACITY_REPORT = "kimi-capacity-report, quoting InferenceX (recipe kimik2.5_int4_*.sh)"
COMPARE_PAGE = "InferenceX compare page, interpolated; concurrency from tokens/s/GPU × 8 / 2 / interactivity"


def _tp8(card: str, concurrency: int, input_tokens: int) -> Callable[[], Estimate]:
    """Kimi K2.5 INT4 on one node under vLLM, prompts and answers mixed, without a draft."""
    layout = Layout(tp=8, experts="width")

    def run() -> Estimate:
        return step.estimate(
            make_scenario(
                Preset(f"8 × {card}", Topology(8, 8, 8), layout, (card,)), gpu(card),
                concurrency=concurrency, context=input_tokens + 512, acceptance=NO_DRAFT, kernel_library="vllm",
                prefill=Prefill(input_tokens, 1024), overlap=OVERLAP,
            )
        )  # fmt: skip

    return run


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
              _tp8(card, c, 8192))
        for card, values in _K25.items()
        for c, value in zip((4, 8, 16, 32, 64), values, strict=True)
    ),
    *(
        Point(f"K2.5 INT4, 8 × {card} TP8, 1k/1k, C≈{c}", "held-out", "single-node", value, COMPARE_PAGE,
              _tp8(card, c, 1024))
        for card, values in _K25_SHORT.items()
        for c, value in values
    ),
    Point("K2 FP8, 96 × H200 EP96, 480 requests a GPU", "held-out", "wide-ep", 3000,
          "LMSYS blog 2025-07-20: 288k tokens/s, 96 redundant experts",
          _wide("h200", 96, 480, 2050, 480, 8, 8, precision=FP8)),
    Point("DeepSeek-V3 FP8, 72 × H100 EP72, 256 requests a GPU", "held-out", "wide-ep", 2785,
          "LMSYS blog 2025-05-05: 22,282 tokens/s a node, 32 redundant experts, two-batch overlap",
          _wide("h100", 72, 256, 2050, 288, 8, 8, precision=FP8, model=DEEPSEEK_V3)),
    Point("DeepSeek-V3 FP8, 72 × H100 EP72, 128 requests a GPU, no overlap", "held-out", "wide-ep", 12929 / 8,
          "LMSYS blog 2025-05-05: 12,929 tokens/s a node without two-batch overlap",
          _wide("h100", 72, 128, 2050, 288, 8, 8, precision=FP8, model=DEEPSEEK_V3)),
    Point("DeepSeek-V3 FP8, H800 EP128, 128 requests a GPU, 4k", "held-out", "wide-ep", 18598 / 8,
          "DeepSeek profile data quoted by LMSYS 2025-05-05: 18,598 tokens/s a node (H800 taken as H100)",
          _wide("h100", 128, 128, 4096, 256, 8, 8, precision=FP8, model=DEEPSEEK_V3)),
    Point("DeepSeek FP8 attention, NVFP4 experts, 48 × GB200 EP48, 1408 a GPU", "held-out", "wide-ep", 13386,
          "LMSYS blog 2025-09-25", _wide("gb200", 48, 1408, 2050, 288, 4, 48, precision=NVFP4, model=DEEPSEEK_V3)),
    Point("DeepSeek FP8 attention, NVFP4 experts, 48 × GB200 EP48, 768 a GPU", "held-out", "wide-ep", 12050,
          "LMSYS blog 2025-09-25: 10 % below the point above",
          _wide("gb200", 48, 768, 2050, 288, 4, 48, precision=NVFP4, model=DEEPSEEK_V3)),
)  # fmt: skip


@dataclass(frozen=True)
class AcceptancePoint:
    """A drafter measured as a chain and as a tree: tokens a round."""

    name: str
    role: Literal["calibration", "held-out"]
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


def compared(role: str) -> Iterator[tuple[str, Point | AcceptancePoint, float]]:
    """Every point of a role with its name in a table and the error that the model claims for it."""
    yield from ((p.name, p, ERROR_BAND[p.family]) for p in POINTS if p.role == role)
    for a in ACCEPTANCE_POINTS:
        if a.role == role:
            yield f"tokens a round: {a.name}, budget {a.budget}", a, ACCEPTANCE_BAND
