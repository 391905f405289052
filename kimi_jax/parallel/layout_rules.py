"""Which layouts a model takes: what is divided, padded and refused, in one place and as data."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.exchange import BACKENDS
from meshes.presets import Layout, LayoutError
from meshes.rules import Dimension, check_dimensions, model_dimensions

if TYPE_CHECKING:
    from kimi_jax.drafter.config import DrafterConfig


class Refusal(NamedTuple):
    """A combination that has no meaning."""

    applies: Callable[[Layout], bool]
    message: str
    """With the layout's fields in braces."""


REFUSALS = (
    Refusal(
        lambda layout: layout.exchange not in BACKENDS,
        f"exchange is {{exchange!r}}: choose from {', '.join(BACKENDS)}",
    ),
    Refusal(
        lambda layout: layout.exchange == "tensor" and layout.experts != "width",
        "exchange 'tensor' belongs to experts split by 'width'; they are split by {experts!r}",
    ),
)


def dimensions(config: ModelConfig, layout: Layout) -> list[Dimension]:
    """What the layout cuts of the model."""
    return model_dimensions(
        layout,
        num_heads=config.num_attention_heads,
        widths={
            "dense width": config.intermediate_size,
            "shared expert width": config.n_shared_experts * config.moe_intermediate_size,
        },
        vocab_size=config.vocab_size,
        expert_width=config.moe_intermediate_size,
        group_size=config.quantization_group_size,
        num_experts=config.n_routed_experts,
    )


def drafter_dimensions(drafter: "DrafterConfig", layout: Layout) -> list[Dimension]:
    """What it cuts of a drafter. Where tp is a multiple of the key-value heads, each rank has a copy of one."""
    kv_heads = drafter.num_key_value_heads
    sizes = {
        "drafter's heads": drafter.num_attention_heads,
        "drafter's key-value heads": layout.tp if layout.tp % kv_heads == 0 else kv_heads,
        "drafter's MLP width": drafter.intermediate_size,
        "drafter's fused taps": drafter.hidden_size,
    }
    return [Dimension(name, size, ("tp",)) for name, size in sizes.items()]


def batch_dimensions(layout: Layout, requests: int, positions: int) -> list[Dimension]:
    """What it cuts of a batch; all of it is padded."""
    cut = [Dimension("requests", requests, layout.batch_axes, padded=True)]
    return [*cut, Dimension("cached positions", positions, ("tp",), padded=True)] if layout.cache == "split" else cut


def check(config: ModelConfig, layout: Layout, drafter: "DrafterConfig | None" = None) -> None:
    """Refuses a layout that the model, and a drafter where there is one, does not take.

    Raises:
      LayoutError: naming what does not fit and what does.
    """
    fields: dict[str, Any] = {"exchange": layout.exchange, "experts": layout.experts}
    for refusal in REFUSALS:
        if refusal.applies(layout):
            raise LayoutError(refusal.message.format(**fields))
    cut = dimensions(config, layout)
    check_dimensions(layout, cut if drafter is None else [*cut, *drafter_dimensions(drafter, layout)])
