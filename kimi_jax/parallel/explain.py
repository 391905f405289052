"""A layout in words and numbers: who holds what, bytes of a device by part, and which message crosses which link.

Nothing is loaded or allocated: bytes are read from the declarations, messages are those of `parallel.messages`.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.exchange_choice import used
from kimi_jax.parallel.layout_rules import batch_dimensions, dimensions, drafter_dimensions
from kimi_jax.parallel.messages import drafter_messages, forward_messages, head_messages, loop_messages
from kimi_jax.parallel.placement import EMPTY, Placement
from kimi_jax.parallel.sharding import rules
from kimi_jax.parameters import Declaration, Path, declarations
from meshes.presets import AXES, Layout, Preset

if TYPE_CHECKING:
    from kimi_jax.drafter.dflash import DFlash
    from kimi_jax.model.transformer import CausalLM

MB = 1e6


@dataclasses.dataclass(frozen=True)
class Held:
    """Arrays of one part that lie the same way."""

    part: str
    axes: tuple[str, ...]
    """Mesh axes that split them, those of size 1 left out; on the other axes every device has a copy."""
    ways: int
    """Devices that share one copy."""
    device_bytes: int


def _part_of(path: Path) -> str:
    names = [str(name) for name in path]
    if "experts" in names:
        return "routed experts"
    if "shared_experts" in names:
        return "shared expert"
    if "gate" in names:
        return "router"
    if "self_attn" in names:
        return "attention"
    if "mlp" in names:
        return "dense layers"
    return {"embed_tokens": "embedding", "lm_head": "head"}.get(names[-2], "norms")


def _axes(declaration: Declaration, layout: Layout) -> tuple[str, ...]:
    named = [
        axis
        for axes in declaration.spec(rules(layout))
        if axes
        for axis in ((axes,) if isinstance(axes, str) else axes)
    ]
    return tuple(axis for axis in AXES if axis in named and layout.axis_sizes[axis] > 1)


def held_weights(module: nnx.Module, layout: Layout, dtype: DTypeLike, part: str | None = None) -> list[Held]:
    """Weights of a module by part, or all as one `part`, and by the axes that split them."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for declaration in declarations(module, dtype):
        axes = _axes(declaration, layout)
        ways = math.prod(layout.axis_sizes[axis] for axis in axes)
        key = (part or _part_of(declaration.path), axes)
        size = math.prod(declaration.shape) * jnp.dtype(declaration.dtype).itemsize
        found[key] = found.get(key, 0) + size // ways
    return [
        Held(name, axes, math.prod(layout.axis_sizes[axis] for axis in axes), size)
        for (name, axes), size in found.items()
    ]


def cache_bytes(config: ModelConfig, layout: Layout, dtype: DTypeLike, tokens: int) -> int:
    """Latents of one request, on each of the tp ranks that serve it."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    parts = layout.tp if layout.cache == "split" else 1
    return config.num_hidden_layers * width * jnp.dtype(dtype).itemsize * -(-tokens // parts)


def context_bytes(drafter: "DFlash", layout: Layout, dtype: DTypeLike, tokens: int) -> int:
    """The drafter's keys and values of one request, on each tp rank."""
    config = drafter.config
    heads = max(config.num_key_value_heads // layout.tp, 1)
    window = min(config.draft_window, tokens)
    return 2 * config.num_hidden_layers * window * heads * config.head_dim * jnp.dtype(dtype).itemsize


def explain(
    machine: Preset,
    model: "CausalLM",
    drafter: "DFlash | None",
    *,
    dtype: DTypeLike,
    requests: int,
    context: int,
    rows: int,
    greedy: bool = True,
) -> Group:
    """Four tables: the axes, how they cut what is there, what a device holds, and what a round sends over which link.

    Args:
      requests: of the whole machine.
      context: cached tokens of each.
      rows: of each request in a step: with a drafter its tree and the root.
      greedy: whether the most likely token is taken; sampling sends all logits.
    """
    layout = machine.layout
    groups = layout.dp * layout.ep
    device_requests = -(-requests // groups)
    return Group(
        Text(f"{machine.name}: {layout}, {layout.num_devices} of {machine.topology.num_gpus} GPUs", style="bold"),
        _axes_table(machine, model.placement, device_requests),
        _dimensions_table(layout, model.config, drafter, requests, context),
        _bytes_table(machine, model, drafter, dtype, device_requests, context),
        _messages_table(machine, model, drafter, dtype, device_requests, rows, greedy),
    )


def _axes_table(machine: Preset, placement: Placement, device_requests: int) -> Table:
    layout = machine.layout
    table = Table("axis", "size", "link", "what it splits", title="who holds what", title_justify="left")
    spread = f"{device_requests} request{'s' if device_requests > 1 else ''} a group of {layout.tp}"
    where = " × ".join(layout.expert_axes)
    table.add_row("dp", str(layout.dp), _link(machine, "dp"), f"requests ({spread}); every replica has all weights")
    table.add_row("ep", str(layout.ep), _link(machine, "ep"), f"requests ({spread}); routed experts over {where}")
    width = ", the width of every routed expert" if layout.experts == "width" else ", routed experts"
    cache = "; positions of the cache" if layout.cache == "split" else "; the cache is copied"
    table.add_row("tp", str(layout.tp), _link(machine, "tp"), f"heads, dense widths, vocabulary{width}{cache}")
    table.add_row("experts", str(layout.expert_ranks), _link(machine, *layout.expert_axes), _experts(placement, layout))
    return table


def _dimensions_table(
    layout: Layout, config: ModelConfig, drafter: "DFlash | None", requests: int, context: int
) -> Table:
    table = Table("dimension", "size", "over", "each", "padding", title="what the axes cut", title_justify="left")
    drafted = drafter_dimensions(drafter.config, layout) if drafter else []
    for cut in (*dimensions(config, layout), *drafted, *batch_dimensions(layout, requests, context)):
        ranks, each = cut.ranks(layout), cut.each(layout)
        padding = f"{each * ranks - cut.size:,}" if cut.padded else "none: must divide"
        where = f"{' × '.join(cut.axes)}: {ranks} ways"
        table.add_row(cut.name, f"{cut.size:,}", where, f"{each:,}", padding)
    return table


def _experts(placement: Placement, layout: Layout) -> str:
    held = np.array(placement.slot_experts).reshape(layout.expert_ranks, -1)
    each = sorted(set((held != EMPTY).sum(1).tolist()))
    empty = int((held == EMPTY).sum())
    replicas = placement.num_slots - empty - placement.num_experts
    return (
        f"{' or '.join(map(str, each))} of {placement.num_experts} experts a rank: {placement.num_slots} slots, "
        f"{replicas} replicas, {empty} empty; exchange {layout.exchange}"
    )


def _link(machine: Preset, *axes: str) -> str:
    span = machine.span(*axes)
    if span.link == "none":
        return "none"
    return f"network, {span.domains} domains" if span.link == "network" else "NVLink"


def _bytes_table(
    machine: Preset,
    model: "CausalLM",
    drafter: "DFlash | None",
    dtype: DTypeLike,
    requests: int,
    context: int,
) -> Table:
    layout = machine.layout
    table = Table("part", "split over", "MB a device", title="bytes of a device", title_justify="left")
    held = held_weights(model, layout, dtype)
    if drafter is not None:
        held += held_weights(drafter, layout, dtype, "drafter")
    total = 0
    for entry in sorted(held, key=lambda entry: (entry.part == "drafter", -entry.device_bytes)):
        table.add_row(entry.part, _split(entry.axes, entry.ways), f"{entry.device_bytes / MB:,.2f}")
        total += entry.device_bytes
    latents = requests * cache_bytes(model.config, layout, dtype, context)
    caches = [("latent cache", latents, "requests, tp" if layout.cache == "split" else "requests only")]
    if drafter is not None:
        caches.append(("drafter's context", requests * context_bytes(drafter, layout, dtype, context), "requests, tp"))
    for name, size, split in caches:
        table.add_row(f"{name}, {requests} × {context:,} tokens", split, f"{size / MB:,.2f}")
        total += size
    table.add_section()
    table.add_row("all of these", "", f"{total / MB:,.2f}", style="bold")
    if layout.tp > 1:
        other = dataclasses.replace(layout, cache="copied" if layout.cache == "split" else "split")
        difference = abs(latents - requests * cache_bytes(model.config, other, dtype, context)) / MB
        saves = "saves" if layout.cache == "split" else "--cache split would save"
        table.caption = f"{saves} {difference:,.2f} MB of latent cache, for two messages more a layer"
    return table


def _split(axes: tuple[str, ...], ways: int) -> str:
    return f"{' × '.join(axes)}: {ways} ways" if axes else "nothing: whole on every device"


def _messages_table(
    machine: Preset,
    model: "CausalLM",
    drafter: "DFlash | None",
    dtype: DTypeLike,
    requests: int,
    rows: int,
    greedy: bool,
) -> Table:
    layout, config, slots = machine.layout, model.config, model.placement.num_slots
    step = requests * rows
    parts = {
        "layers": forward_messages(config, layout, step, dtype, slots),
        "head": head_messages(config, layout, step, greedy=greedy),
        "drafter": drafter_messages(drafter.config, layout, requests, rows - 1, dtype) if drafter and rows > 1 else [],
        "loop": loop_messages(layout),
    }
    backend = used(layout, step, config.num_experts_per_tok, slots) if layout.ep > 1 else "none"
    table = Table(
        "part", "message", "collective", "axes", "link", "count", "kB each", "MB in all",
        title=f"messages of a round of {step} rows a device, exchange {backend}", title_justify="left",
    )  # fmt: skip
    for part, sent in parts.items():
        for message in sent:
            table.add_row(
                part, message.what, message.kind, " × ".join(message.axes), _link(machine, *message.axes),
                str(message.count), f"{message.bytes / 1e3:,.1f}", f"{message.count * message.bytes / MB:,.2f}",
            )  # fmt: skip
        table.add_section()
    if not any(parts.values()):
        table.add_row("", "none: one device does everything", "", "", "", "0", "", "")
    return table
