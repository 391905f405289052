"""Mesh presets: a machine and how the axes dp, ep and tp lie on it.

`dp` holds independent replicas. `ep` splits the batch and the expert slots. `tp` splits heads, matrix columns and,
by the layout's choice, expert slots or the width of every expert. Batch rows lie on ("dp", "ep").
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshes.topology import AxisSpan, Topology, axis_span

AXES = ("dp", "ep", "tp")
ExpertSplit = Literal["slots", "width"]
CacheSplit = Literal["copied", "split"]
HGX_NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9)
"""Nodes of the presets that are listed; more are made by name."""
MOST_GPUS = 1152
"""Of a preset: 16 racks or 144 nodes."""


class LayoutError(ValueError):
    """A layout that cannot exist on the machine or for the model; the message names what works."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the three mesh axes and what is split along them.

    experts: `slots` puts whole experts on ("ep", "tp"); `width` puts them on "ep" and splits each one's width on "tp".
    exchange: the name of the backend that carries rows to experts and back. `auto` takes one by the ranks and slots of
      the layout and the rows of a step (`kimi_jax/parallel/exchange/choice.py`).
    cache: `copied` puts a request's latent cache on all its tp ranks, `split` gives each a part of the positions.
    """

    dp: int = 1
    ep: int = 1
    tp: int = 1
    experts: ExpertSplit = "slots"
    exchange: str = "auto"
    cache: CacheSplit = "copied"
    across: bool = False
    """Whether the ranks of ep lie in several domains, so that a network parts them; a preset sets it."""

    def __post_init__(self):
        for axis, size in self.axis_sizes.items():
            if size < 1:
                raise LayoutError(f"{axis} is {size}: a mesh axis has at least one device")
        if self.experts not in ("slots", "width"):
            raise LayoutError(f"experts is {self.experts!r}: choose 'slots' or 'width'")
        if self.cache not in ("copied", "split"):
            raise LayoutError(f"cache is {self.cache!r}: choose 'copied' or 'split'")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """All three axes in mesh order, also those of size 1."""
        return {"dp": self.dp, "ep": self.ep, "tp": self.tp}

    @property
    def num_devices(self) -> int:
        """GPUs the layout uses."""
        return self.dp * self.ep * self.tp

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes that split batch rows."""
        return ("dp", "ep")

    @property
    def groups(self) -> int:
        """Groups of tp ranks that have requests of their own."""
        return self.dp * self.ep

    def group_requests(self, requests: int) -> int:
        """Requests of the fullest group, of so many in the whole machine; a compiled batch has as many in each."""
        return -(-requests // self.groups)

    @property
    def cache_ranks(self) -> int:
        """Ranks that share a request's cached positions; 1 where each has all of them."""
        return self.tp if self.cache == "split" else 1

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Axes that split expert slots."""
        return ("ep", "tp") if self.experts == "slots" else ("ep",)

    @property
    def expert_ranks(self) -> int:
        """Ranks among which one replica's expert slots are shared."""
        return math.prod(self.axis_sizes[axis] for axis in self.expert_axes)

    def __str__(self) -> str:
        return f"dp {self.dp} × ep {self.ep} × tp {self.tp}"


@dataclass(frozen=True)
class Preset:
    """A named machine with a layout on it. The layout may leave GPUs unused."""

    name: str
    topology: Topology
    layout: Layout
    gpu_names: tuple[str, ...]
    """GPUs (short names of `meshes.hardware`) that this machine exists with; the first is the default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", replace(self.layout, across=self.span("ep").domains > 1))

    def check_gpu(self, gpu_name: str) -> None:
        """Refuses a GPU that the machine does not exist with.

        Raises:
          LayoutError: naming those that it does.
        """
        if gpu_name not in self.gpu_names:
            raise LayoutError(f"{self.name} is made of {', '.join(self.gpu_names)}, not of {gpu_name}")

    def span(self, *axes: str) -> AxisSpan:
        """What a collective over these mesh axes crosses on this machine."""
        return _span(self.layout, self.topology, axes)

    def with_layout(self, layout: Layout) -> "Preset":
        """Put another layout on the same machine.

        Raises:
          LayoutError: it needs more GPUs than the machine has.
        """
        if layout.num_devices > self.topology.num_gpus:
            raise LayoutError(
                f"{layout} needs {layout.num_devices} GPUs and {self.name} has {self.topology.num_gpus}: "
                f"the product of the axes may be at most {self.topology.num_gpus}"
            )
        return replace(self, layout=layout)

    def with_options(
        self, *, dp: int | None = None, ep: int | None = None, tp: int | None = None, **fields: str | None
    ) -> "Preset":
        """Override axes as `with_axes` does, and other fields of the layout by name; None keeps the preset's.

        Raises:
          LayoutError: as `with_axes`, or a value that a field does not take.
        """
        machine = self.with_axes(dp, ep, tp)
        chosen: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        return machine.with_layout(replace(machine.layout, **chosen))

    def with_axes(self, dp: int | None = None, ep: int | None = None, tp: int | None = None) -> "Preset":
        """Override axis sizes; axes left at None keep the preset's.

        The layout may use fewer GPUs than the machine has.

        Raises:
          LayoutError: a size below 1, or a layout that needs more GPUs than the machine has; the message names the
            layouts that fit.
        """
        given = {axis: size for axis, size in zip(AXES, (dp, ep, tp), strict=True) if size is not None}
        layout = replace(self.layout, **given)
        total = self.topology.num_gpus
        if layout.num_devices <= total:
            return self.with_layout(layout)
        axes = " × ".join(f"{axis} {size}" for axis, size in given.items())
        if math.prod(given.values()) > total:
            most = ", ".join(f"{axis} at most {max(1, total * size // math.prod(given.values()))}"
                             for axis, size in given.items())  # fmt: skip
            raise LayoutError(f"{axes} needs {math.prod(given.values())} GPUs and {self.name} has {total}: {most}")
        kept = " × ".join(f"{axis} {size}" for axis, size in self.layout.axis_sizes.items() if axis not in given)
        raise LayoutError(
            f"{axes} beside the preset's {kept} needs {layout.num_devices} GPUs and {self.name} has {total}: state the "
            f"other axes too, as in {self._fitting(given)}"
        )

    def _fitting(self, given: dict[str, int]) -> str:
        """The two layouts with the given sizes that are nearest to the preset's and have no room for more."""
        own, rest = self.layout.axis_sizes, self.topology.num_gpus // math.prod(given.values())
        # A divisor of the preset's tp divides what the preset's does: heads, vocabulary, widths.
        sizes = {axis: [n for n in range(1, rest + 1) if axis != "tp" or own["tp"] % n == 0] for axis in AXES}
        choices = [sizes[axis] if axis not in given else [given[axis]] for axis in AXES]
        fit = [chosen for chosen in itertools.product(*choices) if math.prod(chosen) <= self.topology.num_gpus]
        full = [a for a in fit if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in fit)]
        full.sort(key=lambda a: sum(abs(math.log(n / own[axis])) for axis, n in zip(AXES, a, strict=True)))
        layouts = [replace(self.layout, **dict(zip(AXES, chosen, strict=True))) for chosen in full[:2]]
        return " or ".join(f"{a} ({a.num_devices} of {self.topology.num_gpus} GPUs)" for a in layouts)


@functools.lru_cache(maxsize=4096)
def _span(layout: Layout, topology: Topology, axes: tuple[str, ...]) -> AxisSpan:
    return axis_span(layout.axis_sizes, axes, topology)


def expert_slots(num_experts: int, ranks: int) -> int:
    """Slots for `num_experts` over `ranks`, every rank alike: 384 on 36 ranks is 396, on 72 ranks 432.

    The slots beyond `num_experts` stay empty or hold replicas; nothing is routed to an empty one.
    """
    return -(-num_experts // ranks) * ranks


HGX_GPUS = ("b300", "b200", "h200", "h100")
NVL_GPUS = ("gb300", "gb200")


def _hgx(num_gpus: int) -> Preset:
    # A node is one tensor-parallel group, so every all-reduce stays on NVLink and only rows cross InfiniBand.
    return Preset(
        name=f"hgx-ib-{num_gpus}",
        topology=Topology(num_gpus=num_gpus, gpus_per_node=8, gpus_per_domain=8),
        layout=Layout(ep=num_gpus // 8, tp=8),
        gpu_names=HGX_GPUS,
    )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        # One node of up to eight GPUs; one of them unless axes are given.
        Preset("local", Topology(8, 8, 8), Layout(), (*HGX_GPUS, *NVL_GPUS, "rtx-pro-6000")),
        *(_hgx(8 * nodes) for nodes in HGX_NODES),
        # Nine trays of four GPUs. 64 heads do not divide by 36, 18, 12 or 9, so tp is 4, one tray.
        Preset("nvl36", Topology(36, 4, 36), Layout(ep=9, tp=4), NVL_GPUS),
        # 18 trays of four GPUs. 64 heads do not divide by 72, 36, 24, 18, 12 or 9: tp 8 is the widest that fills it.
        Preset("nvl72", Topology(72, 4, 72), Layout(ep=9, tp=8), NVL_GPUS),
    )
}


def preset(name: str) -> Preset:
    """Look a preset up: `local`, `hgx-ib` (16 GPUs), `hgx-ib-N`, `nvl36`, `nvl72`, or `nvl72xN`, N racks on InfiniBand.

    Raises:
      LayoutError: no such machine; the message names those that exist.
    """
    name = "hgx-ib-16" if name == "hgx-ib" else name
    if name in PRESETS:
        return PRESETS[name]
    count = name.removeprefix("hgx-ib-")
    if count != name and count.isdigit() and int(count):
        gpus = int(count)
        if gpus > MOST_GPUS:
            raise LayoutError(f"{name}: presets end at {MOST_GPUS // 8} nodes, hgx-ib-{MOST_GPUS}")
        if gpus % 8 == 0:
            return _hgx(gpus)
        below, above = gpus // 8 * 8, -(-gpus // 8) * 8
        near = " or ".join(f"hgx-ib-{size}" for size in (below, above) if size)
        raise LayoutError(f"{name}: {gpus} GPUs are {gpus / 8:g} nodes of 8, and a node comes whole: use {near}")
    racks = name.removeprefix("nvl72x")
    if racks != name and racks.isdigit() and int(racks) > 1:
        if 72 * int(racks) > MOST_GPUS:
            raise LayoutError(f"{name}: presets end at {MOST_GPUS // 72} racks, nvl72x{MOST_GPUS // 72}")
        rack = PRESETS["nvl72"]
        racked = replace(rack.topology, num_gpus=72 * int(racks))
        return replace(rack, name=name, topology=racked, layout=replace(rack.layout, dp=int(racks)))
    raise LayoutError(f"unknown mesh {name!r}: choose from hgx-ib, {', '.join(PRESETS)}")
