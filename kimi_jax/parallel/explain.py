"""A layout in words and numbers: who holds what, bytes of a device by part, and which message crosses which link.

Nothing is loaded or allocated: bytes are read from the declarations, and `messages` says what a forward sends; the
tests hold it against the compiled programs.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.exchange import buffer_rows
from kimi_jax.parallel.exchange.all_to_all import used
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


def cache_bytes(config: ModelConfig, dtype: DTypeLike, tokens: int) -> int:
    """Latents of one request, on each of the tp ranks that serve it."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return config.num_hidden_layers * width * jnp.dtype(dtype).itemsize * tokens


def context_bytes(drafter: "DFlash", layout: Layout, dtype: DTypeLike, tokens: int) -> int:
    """The drafter's keys and values of one request, on each tp rank."""
    config = drafter.config
    heads = max(config.num_key_value_heads // layout.tp, 1)
    window = min(config.draft_window, tokens)
    return 2 * config.num_hidden_layers * window * heads * config.head_dim * jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of the target's forward, as a device sees it."""

    what: str
    kind: str
    axes: tuple[str, ...]
    count: int
    """In a forward, over all layers."""
    bytes: int
    """Of one: what a device contributes to a sum or sends, what it holds after a gather."""


def messages(config: ModelConfig, layout: Layout, rows: int, dtype: DTypeLike, slots: int) -> list[Message]:
    """What one forward of the layers sends for `rows` rows of a device; axes of size 1 send nothing.

    A step of the exchange `alltoall` whose buffers overflow sends its dispatch, and then what `allgather` sends.
    """
    row = config.hidden_size * jnp.dtype(dtype).itemsize
    layers = config.num_hidden_layers
    moe = layers - config.first_k_dense_replace
    found = []
    if layout.tp > 1:
        found.append(Message("embedding", "all-reduce", ("tp",), 1, rows * row))
        found.append(Message("after attention", "all-reduce", ("tp",), layers, rows * row))
        found.append(Message("after MLP or experts", "all-reduce", ("tp",), layers, rows * row))
    if layout.ep > 1:
        found += _exchange(config, layout, rows, row, moe, slots)
    return found


def _exchange(config: ModelConfig, layout: Layout, rows: int, row: int, layers: int, slots: int) -> Iterator[Message]:
    choice = 8 * config.num_experts_per_tok  # an id and a weight of four bytes each
    backend = used(layout, rows, config.num_experts_per_tok, slots)
    ep = ("ep",)
    if backend in ("allgather", "tensor"):
        yield Message("rows to experts", "all-gather", ep, layers, layout.ep * rows * (row + choice))
        yield Message("sums back", "reduce-scatter", ep, layers, layout.ep * rows * row)
        return
    if backend == "ragged":
        due = math.ceil(rows * layout.ep * _needed(config, slots, slots // layout.expert_ranks))
        yield Message("rows due by rank", "all-to-all", ep, layers, 4 * layout.ep)
        yield Message("rows to experts, expected", "ragged-all-to-all", ep, layers, due * (row + choice))
        yield Message("sums back, expected", "ragged-all-to-all", ep, layers, due * row)
        return
    capacity = buffer_rows(rows, config.num_experts_per_tok, slots, slots // layout.expert_ranks, layout.ep)
    yield Message("rows to experts", "all-to-all", ep, layers, layout.ep * capacity * (row + choice + 4))
    yield Message("sums back", "all-to-all", ep, layers, layout.ep * capacity * row)


def _needed(config: ModelConfig, slots: int, local: int) -> float:
    """Probability that a row's even choices touch a rank."""
    return 1 - math.prod(max(slots - local - i, 0) / (slots - i) for i in range(config.num_experts_per_tok))


def explain(
    machine: Preset,
    model: "CausalLM",
    drafter: "DFlash | None",
    *,
    dtype: DTypeLike,
    requests: int,
    context: int,
    rows: int,
) -> Group:
    """Three tables: the axes, what a device holds, and what a verification sends over which link.

    Args:
      requests: of the whole machine.
      context: cached tokens of each.
      rows: of each request in a step.
    """
    layout = machine.layout
    groups = layout.dp * layout.ep
    device_requests = -(-requests // groups)
    return Group(
        Text(f"{machine.name}: {layout}, {layout.num_devices} of {machine.topology.num_gpus} GPUs", style="bold"),
        _axes_table(machine, model.placement, device_requests),
        _bytes_table(machine, model, drafter, dtype, device_requests, context),
        _messages_table(machine, model, dtype, device_requests * rows),
    )


def _axes_table(machine: Preset, placement: Placement, device_requests: int) -> Table:
    layout = machine.layout
    table = Table("axis", "size", "link", "what it splits", title="who holds what", title_justify="left")
    spread = f"{device_requests} request{'s' if device_requests > 1 else ''} a group of {layout.tp}"
    where = " × ".join(layout.expert_axes)
    table.add_row("dp", str(layout.dp), _link(machine, "dp"), f"requests ({spread}); every replica has all weights")
    table.add_row("ep", str(layout.ep), _link(machine, "ep"), f"requests ({spread}); routed experts over {where}")
    width = ", the width of every routed expert" if layout.experts == "width" else ", routed experts"
    table.add_row(
        "tp", str(layout.tp), _link(machine, "tp"), f"heads, dense widths, vocabulary{width}; cache is copied"
    )
    table.add_row("experts", str(layout.expert_ranks), _link(machine, *layout.expert_axes), _experts(placement, layout))
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
    caches = [("latent cache", requests * cache_bytes(model.config, dtype, context), "requests only")]
    if drafter is not None:
        caches.append(("drafter's context", requests * context_bytes(drafter, layout, dtype, context), "requests, tp"))
    for name, size, split in caches:
        table.add_row(f"{name}, {requests} × {context:,} tokens", split, f"{size / MB:,.2f}")
        total += size
    table.add_section()
    table.add_row("all of these", "", f"{total / MB:,.2f}", style="bold")
    return table


def _split(axes: tuple[str, ...], ways: int) -> str:
    return f"{' × '.join(axes)}: {ways} ways" if axes else "nothing: whole on every device"


def _messages_table(machine: Preset, model: "CausalLM", dtype: DTypeLike, rows: int) -> Table:
    layout, config = machine.layout, model.config
    backend = used(layout, rows, config.num_experts_per_tok, model.placement.num_slots)
    table = Table(
        "message", "collective", "axes", "link", "a layer", "in all", "kB each",
        title=f"messages of a verification of {rows} rows a device, exchange {backend}", title_justify="left",
    )  # fmt: skip
    for message in messages(config, layout, rows, dtype, model.placement.num_slots):
        layer = "" if message.count == 1 else "1" if message.count == config.num_hidden_layers else "1 (MoE)"
        link = _link(machine, *message.axes)
        table.add_row(
            message.what, message.kind, " × ".join(message.axes), link, layer, str(message.count),
            f"{message.bytes / 1e3:,.1f}",
        )  # fmt: skip
    if not table.rows:
        table.add_row("none: one device does everything", "", "", "", "", "0", "")
    return table
