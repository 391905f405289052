"""What a picture costs before its answer begins: the tower, then the chunks of its prompt."""

import dataclasses
import math
from typing import Any

from rich.table import Table

from kimi_jax.estimator.scenario import Scenario
from kimi_jax.estimator.step import estimate
from kimi_jax.ledger.constants import Constants
from kimi_jax.tables import left, right, table
from kimi_jax.vision.config import VisionConfig
from kimi_jax.vision.media import TOKENS_PER, bucket

CHUNK = 512
"""Prompt tokens of a chunk."""


@dataclasses.dataclass(frozen=True)
class ImageEstimate:
    """One picture and a question about it, on a machine that does nothing else."""

    width: int
    height: int
    patches: int
    computed_patches: int
    """With the padding of the program that sees it."""
    tokens: int
    tower_ms: float
    prompt_ms: float
    """Of the picture's tokens and the question's."""
    weights_gb: float
    """Tower and projector on every GPU, GB."""

    @property
    def first_token_ms(self) -> float:
        """Time to the first token of the answer."""
        return self.tower_ms + self.prompt_ms


def image(s: Scenario, config: VisionConfig, width: int, height: int, question: int = 32) -> ImageEstimate:
    """A picture of so many pixels, with a question of so many tokens. The rates are those of long prompts."""
    from kimi_jax.ledger.vision import vision  # imports jax, for which `--help` should not wait

    _, rows, columns = config.processing.grid(width, height)
    patches, tokens = rows * columns, rows * columns // TOKENS_PER
    computed = bucket(patches)
    need = vision(config, computed)
    prompt, chunks = tokens + question, math.ceil((tokens + question) / CHUNK)
    alone = dataclasses.replace(
        s, concurrency=0, budget=0, prefill=None, chunk=math.ceil(prompt / chunks), chunk_context=prompt // 2
    )
    return ImageEstimate(
        width, height, patches, computed, tokens,
        tower_ms=sum(_ms(s, work.hbm_bytes, work.flops, s.constants) for work in need.work.values()),
        prompt_ms=chunks * estimate(alone).step_ms,
        weights_gb=need.weights / 1e9,
    )  # fmt: skip


def _ms(s: Scenario, num_bytes: float, flops: float, constants: Constants) -> float:
    memory = num_bytes / (constants.dense_bandwidth_fraction * s.gpu.hbm_bytes_per_s)
    return 1e3 * max(memory, flops / (constants.prompt_flop_fraction * s.gpu.bf16_flops_per_s))


def as_dict(e: ImageEstimate) -> dict[str, Any]:
    """For `--json`."""
    return dataclasses.asdict(e) | {"first_token_ms": e.first_token_ms}


def images_table(s: Scenario, estimates: list[ImageEstimate]) -> Table:
    """Pictures with what each costs until the first token."""
    columns = (*left("pixels"), *right("patches", "tokens", "tower ms", "prompt ms", "first token ms"))
    rows = [
        (f"{e.width} × {e.height}", f"{e.patches:,}", f"{e.tokens:,}", f"{e.tower_ms:.1f}", f"{e.prompt_ms:.1f}",
         f"{e.first_token_ms:.1f}")
        for e in estimates
    ]  # fmt: skip
    title = f"Until the first token: {s.preset.name}, {s.gpu.name}, nothing else at work"
    return table(title, columns, rows)
