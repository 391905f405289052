"""A layout in words and numbers: who holds what, bytes of a device by part, and which message crosses which link.

Nothing is loaded or allocated: all of it is the ledger of a step, printed.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.table import Table
from rich.text import Text

from kimi_jax.ledger.layout_rules import batch_dimensions, dimensions, drafter_dimensions
from kimi_jax.ledger.step import Step, ledger
from kimi_jax.ledger.weights import Shard, drafter_shards, model_shards
from kimi_jax.parallel.placement import EMPTY, Placement
from kimi_jax.tables import left, right, table
from meshes.presets import Layout, Preset
from meshes.rules import Dimension

MB = 1e6


def explain(machine: Preset, step: Step, placement: Placement) -> list[Text | Table]:
    """Four tables: the axes, how they cut what is there, what a device holds, and what the step sends over which link.

    Args:
      machine: has the step's layout.
      step: what is counted.
      placement: of the experts of one layer.
    """
    layout, data = step.layout, explain_data(machine, step, placement)
    return [
        Text(f"{machine.name}: {layout}, {layout.num_devices} of {machine.topology.num_gpus} GPUs", style="bold"),
        _axes_table(machine, placement, step.device_requests),
        _dimensions_table(data),
        _bytes_table(step, data),
        _messages_table(step, data),
    ]


def explain_data(machine: Preset, step: Step, placement: Placement) -> dict[str, Any]:
    """The same as plain values; bytes are those of one device, `link` is none, NVLink or the network."""
    layout, needs, dtype = step.layout, ledger(step), jnp.dtype(step.dtype)
    drafted = drafter_dimensions(step.drafter, layout) if step.drafter else []
    cuts = (*dimensions(step.config, layout), *drafted, *batch_dimensions(layout, step.requests, step.context))
    shards = [_by_axes(model_shards(step.config, layout, dtype, step.num_slots))]
    caches = {"latent cache": needs["attention"].cache}
    if step.drafter is not None:
        shards.append(_by_axes(drafter_shards(step.drafter, layout, dtype)))
        caches["drafter's context"] = needs["drafter"].cache
    weights = [
        {"part": part, "axes": axes, "ways": math.prod(layout.axis_sizes[axis] for axis in axes), "bytes": size}
        for held in shards
        for (part, axes), size in sorted(held.items(), key=lambda entry: -entry[1])
    ]
    return {
        "mesh": machine.name,
        "gpus": layout.num_devices,
        "layout": dataclasses.asdict(layout),
        "links": {axis: _link(machine, axis) for axis in layout.axis_sizes},
        "exchange": step.used_exchange if layout.ep > 1 else "none",
        "experts": _slots(placement, layout),
        "requests": step.requests,
        "requests_per_device_group": step.device_requests,
        "rows_per_device": step.device_rows,
        "context": step.context,
        "dimensions": [_cut(cut, layout) for cut in cuts],
        "weights": weights,
        "caches": caches,
        "total_bytes": sum(each["bytes"] for each in weights) + sum(caches.values()),
        "messages": [
            {"part": part, "what": message.what, "kind": message.kind, "axes": message.axes,
             "link": _link(machine, *message.axes), "count": message.count, "bytes": message.bytes}
            for part, need in needs.items()
            for message in need.messages
        ],
    }  # fmt: skip


def _cut(cut: Dimension, layout: Layout) -> dict[str, Any]:
    ranks, each = cut.ranks(layout), cut.each(layout)
    padding = each * ranks - cut.size if cut.padded else None  # None: the ranks must divide the size
    return {"name": cut.name, "size": cut.size, "axes": cut.axes, "ranks": ranks, "each": each, "padding": padding}


def _axes_table(machine: Preset, placement: Placement, device_requests: int) -> Table:
    layout = machine.layout
    spread = f"{device_requests} request{'s' if device_requests > 1 else ''} a group of {layout.tp}"
    where = " × ".join(layout.expert_axes)
    width = ", the width of every routed expert" if layout.experts == "width" else ", routed experts"
    cache = "; positions of the cache" if layout.cache == "split" else "; the cache is copied"
    rows = [
        ("dp", str(layout.dp), _link(machine, "dp"), f"requests ({spread}); every replica has all weights"),
        ("ep", str(layout.ep), _link(machine, "ep"), f"requests ({spread}); routed experts over {where}"),
        ("tp", str(layout.tp), _link(machine, "tp"), f"heads, dense widths, vocabulary{width}{cache}"),
        ("experts", str(layout.expert_ranks), _link(machine, *layout.expert_axes), _experts(placement, layout)),
    ]
    columns = (*left("axis"), *right("size"), *left("link", "what it splits"))
    return table("who holds what", columns, rows, wide=True)


def _dimensions_table(data: dict[str, Any]) -> Table:
    rows = [
        (cut["name"], f"{cut['size']:,}", f"{' × '.join(cut['axes'])}: {cut['ranks']} ways", f"{cut['each']:,}",
         "none: must divide" if cut["padding"] is None else f"{cut['padding']:,}")
        for cut in data["dimensions"]
    ]  # fmt: skip
    columns = (*left("dimension"), *right("size"), *left("over"), *right("each"), *left("padding"))
    return table("what the axes cut", columns, rows)


def _slots(placement: Placement, layout: Layout) -> dict[str, Any]:
    held = np.array(placement.slot_experts).reshape(layout.expert_ranks, -1)
    empty = int((held == EMPTY).sum())
    return {
        "number": placement.num_experts,
        "slots": placement.num_slots,
        "per_rank": sorted(set((held != EMPTY).sum(1).tolist())),
        "replicas": placement.num_slots - empty - placement.num_experts,
        "empty": empty,
    }


def _experts(placement: Placement, layout: Layout) -> str:
    has = _slots(placement, layout)
    return (
        f"{' or '.join(map(str, has['per_rank']))} of {has['number']} experts a rank: {has['slots']} slots, "
        f"{has['replicas']} replicas, {has['empty']} empty; exchange {layout.exchange}"
    )


def _link(machine: Preset, *axes: str) -> str:
    span = machine.span(*axes)
    if span.link == "none":
        return "none"
    return f"network, {span.domains} domains" if span.link == "network" else "NVLink"


def _bytes_table(step: Step, data: dict[str, Any]) -> Table:
    layout, latents = step.layout, data["caches"]["latent cache"]
    rows: list[tuple[str, ...] | None] = [
        (each["part"], f"{' × '.join(each['axes'])}: {each['ways']} ways" if each["axes"] else WHOLE,
         f"{each['bytes'] / MB:,.2f}")
        for each in data["weights"]
    ]  # fmt: skip
    for name, size in data["caches"].items():
        split = "requests only" if name == "latent cache" and layout.cache_ranks == 1 else "requests, tp"
        rows.append((f"{name}, {step.device_requests} × {step.context:,} tokens", split, f"{size / MB:,.2f}"))
    rows += [None, ("all of these", "", f"{data['total_bytes'] / MB:,.2f}")]
    caption = None
    if layout.tp > 1:
        other = dataclasses.replace(layout, cache="copied" if layout.cache == "split" else "split")
        difference = abs(latents - ledger(dataclasses.replace(step, layout=other))["attention"].cache) / MB
        saves = "saves" if layout.cache == "split" else "--cache split would save"
        caption = f"{saves} {difference:,.2f} MB of latent cache, for two messages more a layer"
    columns = (*left("part", "split over"), *right("MB a device"))
    return table("bytes of a device", columns, rows, caption=caption)


WHOLE = "nothing: whole on every device"


def _by_axes(shards: Iterable[Shard]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes by part and by the axes that split them."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for shard in shards:
        found[shard.part, shard.axes] = found.get((shard.part, shard.axes), 0) + shard.bytes
    return found


def _messages_table(step: Step, data: dict[str, Any]) -> Table:
    rows: list[tuple[str, ...] | None] = []
    last = None
    for message in data["messages"]:
        if last not in (None, message["part"]):
            rows.append(None)
        last, total = message["part"], message["count"] * message["bytes"]
        rows.append(
            (message["part"], message["what"], message["kind"], " × ".join(message["axes"]), message["link"],
             str(message["count"]), f"{total / 1e3:,.1f}")
        )  # fmt: skip
    if not rows:
        rows.append(("", "none: one device does everything", "", "", "", "0", ""))
    columns = (*left("part", "message", "collective", "axes", "link"), *right("count", "kB in all"))
    title = f"messages of a round of {step.device_rows} rows a device, exchange {data['exchange']}"
    return table(title, columns, rows)
