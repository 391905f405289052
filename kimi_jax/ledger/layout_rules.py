"""Which layouts a model takes: what is divided, padded and refused, in one place and as data."""

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.parallel.exchange import backend
from meshes.presets import Layout
from meshes.rules import Dimension, check_dimensions


def dimensions(config: ModelConfig, layout: Layout) -> list[Dimension]:
    """What the layout cuts of the model. Expert slots are padded; an expert's width is cut between INT4 groups only."""
    sizes = {
        "attention heads": config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "dense width": config.intermediate_size,
        "shared expert width": config.n_shared_experts * config.moe_intermediate_size,
    }
    if layout.experts == "width":
        group = config.quantization_group_size
        sizes[f"expert width in groups of {group}"] = config.moe_intermediate_size // group
    cut = [Dimension(name, size, ("tp",)) for name, size in sizes.items()]
    return [*cut, Dimension("routed experts", config.n_routed_experts, layout.expert_axes, padded=True)]


def drafter_dimensions(drafter: DrafterConfig, layout: Layout) -> list[Dimension]:
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


def check(config: ModelConfig, layout: Layout, drafter: DrafterConfig | None = None) -> None:
    """Refuses a layout that the model, and a drafter where there is one, does not take.

    Raises:
      LayoutError: naming the exchange or the dimension that does not fit, and what does.
    """
    backend(layout.exchange)
    cut = dimensions(config, layout)
    check_dimensions(layout, cut if drafter is None else [*cut, *drafter_dimensions(drafter, layout)])
