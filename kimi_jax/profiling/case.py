"""What is compiled or run to be profiled: a program of a model on a machine, at a load."""

import dataclasses
from typing import get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.ledger.step import Program, Step
from kimi_jax.parallel.sharding import cache_multiple, rules
from meshes.presets import Preset


def with_layers(config: ModelConfig, drafter: DrafterConfig, layers: int) -> tuple[ModelConfig, DrafterConfig]:
    """The first `layers` of a model, the drafter's taps spread over them: a quick look at the same program."""
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"layers is {layers}; the model has 1 to {config.num_hidden_layers}")
    last = max(len(drafter.target_layer_ids) - 1, 1)
    taps = tuple(tap * (layers - 1) // last for tap in range(len(drafter.target_layer_ids)))
    return (
        dataclasses.replace(config, num_hidden_layers=layers),
        dataclasses.replace(drafter, num_target_layers=layers, target_layer_ids=taps),
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled: one program of one model on one machine, at one load."""

    config: ModelConfig
    preset: Preset
    gpu: str | None
    """Short name of `meshes.hardware`; None where the devices are no GPUs, so that nothing is held against a card."""
    requests: int
    """In the whole machine."""
    context: int
    """Cached tokens of each request."""
    budget: int = 15
    """Tree nodes a round verifies, the root not counted; 0 decodes without a drafter."""
    drafter: DrafterConfig | None = None
    """None where the budget is 0."""
    program: Program = "round"
    prefill_chunk: int = 512
    """Rows of each request in a prefill step, or of one prompt of each device group in a mixed step."""
    dtype: DTypeLike = jnp.bfloat16

    def __post_init__(self) -> None:
        if self.program not in get_args(Program):
            raise ValueError(f"program is {self.program!r}; choose from {', '.join(get_args(Program))}")
        for name in ("requests", "context", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.budget < 0:
            raise ValueError(f"budget is {self.budget}; a tree has 0 nodes or more")
        if self.budget and self.drafter is None:
            raise ValueError(f"a budget of {self.budget} nodes needs a drafter's configuration")

    @property
    def title(self) -> str:
        """The case in one line."""

        def many(count: int, what: str) -> str:
            return f"{count} {what}{'s' if count > 1 else ''}"

        return (
            f"{self.program} of {self.config.num_hidden_layers} layers on {self.preset.name} ({self.preset.layout}) "
            f"with {self.gpu or 'CPU devices'}: {many(self.requests, 'request')} × {many(self.rows, 'row')} "
            f"at context {self.context}, "
            f"{many(self.device_requests, 'request')} a device"
        )

    @property
    def step(self) -> Step:
        """What the ledger is asked for this case."""
        return Step(
            self.config, self.preset.layout, self.requests, self.rows, self.context,
            self.drafter if self.budget else None, self.program,
            self.prefill_chunk if self.program == "mixed" else 0, dtype=self.dtype,
        )  # fmt: skip

    @property
    def device_requests(self) -> int:
        """Requests of one device."""
        return self.step.device_requests

    @property
    def padded_requests(self) -> int:
        """Requests of the compiled program."""
        return self.device_requests * self.preset.layout.groups

    @property
    def expert_slots(self) -> int:
        """Expert slots of one replica, over all its ranks."""
        return self.step.num_slots

    @property
    def exchange(self) -> str:
        """What carries rows to experts on other ep ranks: the layout's, or what `auto` takes for these rows."""
        return self.step.used_exchange

    @property
    def rows(self) -> int:
        """Rows the target runs for each request."""
        return self.prefill_chunk if self.program == "prefill" else self.budget + 1

    @property
    def depth(self) -> int:
        """Longest path of a draft tree."""
        return min(self.drafter.block_size - 1, self.budget) if self.drafter and self.budget else 0

    @property
    def capacity(self) -> int:
        """Cached positions that are compiled for: the context and one round's rows."""
        layout = self.preset.layout
        multiple = cache_multiple(rules(layout), layout.axis_sizes)
        return -(-(self.context + self.depth + 1) // multiple) * multiple
