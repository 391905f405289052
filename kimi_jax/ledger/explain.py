"""A layout in words and numbers: who holds what, bytes of a device by part, and which message crosses which link.

Nothing is loaded or allocated: all of it is the ledger of a step, printed.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kimi_jax.ledger.layout_rules import batch_dimensions, dimensions, drafter_dimensions
from kimi_jax.ledger.step import Need, Step, ledger
from kimi_jax.ledger.weights import Shard, drafter_shards, model_shards
from kimi_jax.parallel.placement import EMPTY, Placement
from meshes.presets import Layout, Preset

MB = 1e6


def explain(machine: Preset, step: Step, placement: Placement) -> Group:
    """Four tables: the axes, how they cut what is there, what a device holds, and what the step sends over which link.

    Args:
      machine: has the step's layout.
      step: what is counted.
      placement: of the experts of one layer.
    """
    layout = step.layout
    return Group(
        Text(f"{machine.name}: {layout}, {layout.num_devices} of {machine.topology.num_gpus} GPUs", style="bold"),
        _axes_table(machine, placement, step.device_requests),
        _dimensions_table(step),
        _bytes_table(step),
        _messages_table(machine, step),
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


def _dimensions_table(step: Step) -> Table:
    layout = step.layout
    table = Table("dimension", "size", "over", "each", "padding", title="what the axes cut", title_justify="left")
    drafted = drafter_dimensions(step.drafter, layout) if step.drafter else []
    batch = batch_dimensions(layout, step.requests, step.context)
    for cut in (*dimensions(step.config, layout), *drafted, *batch):
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


def _bytes_table(step: Step) -> Table:
    layout, needs = step.layout, ledger(step)
    table = Table("part", "split over", "MB a device", title="bytes of a device", title_justify="left")
    dtype = jnp.dtype(step.dtype)
    held = _by_axes(model_shards(step.config, layout, dtype, step.num_slots))
    drafted = {} if step.drafter is None else _by_axes(drafter_shards(step.drafter, layout, dtype))
    for each in (held, drafted):
        for (part, axes), size in sorted(each.items(), key=lambda entry: -entry[1]):
            table.add_row(part, _split(axes, layout), f"{size / MB:,.2f}")
    latents = needs["attention"].cache
    caches = [("latent cache", latents, "requests, tp" if layout.cache_ranks > 1 else "requests only")]
    if step.drafter is not None:
        caches.append(("drafter's context", needs["drafter"].cache, "requests, tp"))
    for name, size, split in caches:
        table.add_row(f"{name}, {step.device_requests} × {step.context:,} tokens", split, f"{size / MB:,.2f}")
    table.add_section()
    total = sum(held.values()) + sum(drafted.values()) + sum(size for _, size, _ in caches)
    table.add_row("all of these", "", f"{total / MB:,.2f}", style="bold")
    if layout.tp > 1:
        other = dataclasses.replace(layout, cache="copied" if layout.cache == "split" else "split")
        difference = abs(latents - ledger(dataclasses.replace(step, layout=other))["attention"].cache) / MB
        saves = "saves" if layout.cache == "split" else "--cache split would save"
        table.caption = f"{saves} {difference:,.2f} MB of latent cache, for two messages more a layer"
    return table


def _by_axes(shards: Iterable[Shard]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes by part and by the axes that split them."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for shard in shards:
        found[shard.part, shard.axes] = found.get((shard.part, shard.axes), 0) + shard.bytes
    return found


def _split(axes: tuple[str, ...], layout: Layout) -> str:
    ways = math.prod(layout.axis_sizes[axis] for axis in axes)
    return f"{' × '.join(axes)}: {ways} ways" if axes else "nothing: whole on every device"


def _messages_table(machine: Preset, step: Step) -> Table:
    exchange = step.used_exchange if step.layout.ep > 1 else "none"
    table = Table(
        "part", "message", "collective", "axes", "link", "count", "kB each", "MB in all",
        title=f"messages of a round of {step.device_rows} rows a device, exchange {exchange}", title_justify="left",
    )  # fmt: skip
    sent: dict[str, Need] = {part: need for part, need in ledger(step).items() if need.messages}
    for part, need in sent.items():
        for message in need.messages:
            table.add_row(
                part, message.what, message.kind, " × ".join(message.axes), _link(machine, *message.axes),
                str(message.count), f"{message.bytes / 1e3:,.1f}", f"{message.count * message.bytes / MB:,.2f}",
            )  # fmt: skip
        table.add_section()
    if not sent:
        table.add_row("", "none: one device does everything", "", "", "", "0", "", "")
    return table
