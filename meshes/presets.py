"""Mesh presets: a machine and how the axes dp, ep and tp lie on it.

`dp` holds independent replicas. `ep` splits the batch and the expert slots. `tp` splits heads, matrix columns and,
by the layout's choice, expert slots or the width of every expert. Batch rows lie on ("dp", "ep").
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

from meshes.topology import AxisSpan, Topology, axis_span

AXES = ("dp", "ep", "tp")
HGX_NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9)


class LayoutError(ValueError):
    """A layout that cannot exist on the machine or for the model; the message names what works."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the three mesh axes and what is split along them.

    experts: `slots` puts whole experts on ("ep", "tp"); `width` puts them on "ep" and splits each one's width on "tp".
    exchange: the name of the backend that carries rows to experts and back. `auto` takes `allgather` or `alltoall` by
      the ranks and slots of the layout and the rows of a step (`kimi_jax/parallel/exchange_choice.py`).
    cache: `copied` puts a request's latent cache on all its tp ranks, `split` gives each a part of the positions.
    """

    dp: int = 1
    ep: int = 1
    tp: int = 1
    experts: Literal["slots", "width"] = "slots"
    exchange: str = "auto"
    cache: Literal["copied", "split"] = "copied"

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

    def check_gpu(self, gpu_name: str) -> None:
        """Raises LayoutError where the machine does not exist with this GPU."""
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

    def with_axes(self, dp: int | None = None, ep: int | None = None, tp: int | None = None) -> "Preset":
        """Override axis sizes; axes left at None are filled so that the machine is used whole.

        tp keeps the largest size that the preset's own tp allows, ep takes the rest. Sizes that do not divide the
        machine are taken as a stated subset when all three are given, or when they leave room for nothing else
        (tp 64 on 64 of 72). On `local` axes left at None are 1.

        Raises:
            LayoutError: the product cannot be laid on the machine; the message names what works.
        """
        given = {axis: size for axis, size in zip(AXES, (dp, ep, tp), strict=True) if size is not None}
        if not given:
            return self
        for axis, size in given.items():
            if size < 1:
                raise LayoutError(f"{axis} is {size}: a mesh axis has at least one device")
        total, stated = self.topology.num_gpus, math.prod(given.values())
        axes = " × ".join(f"{axis} {size}" for axis, size in given.items())
        if stated > total:
            raise LayoutError(f"{axes} needs {stated} GPUs and {self.name} has {total}")
        fills_machine = self.layout.num_devices == total
        if not fills_machine or len(given) == 3 or stated > total // 2:
            sizes = dict.fromkeys(AXES, 1) | given
        elif total % stated == 0:
            sizes = self._fill(given, total // stated)
        else:
            divisors = ", ".join(str(d) for d in range(1, total + 1) if total % d == 0)
            raise LayoutError(
                f"{axes} does not divide the {total} GPUs of {self.name}: sizes that do are {divisors}. "
                f"To use {total // stated * stated} of {total} GPUs, state all three axes"
            )
        return self.with_layout(replace(self.layout, **sizes))

    def _fill(self, given: dict[str, int], rest: int) -> dict[str, int]:
        """Share `rest` among the axes that were not given."""
        free = [axis for axis in AXES if axis not in given]
        sizes = {axis: 1 for axis in free} | given
        if "tp" in free and len(free) > 1:
            sizes["tp"] = math.gcd(rest, self.layout.tp)
            rest //= sizes["tp"]
            free.remove("tp")
        sizes["ep" if "ep" in free else free[0]] = rest
        return sizes


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
    """Look a preset up: `local`, `hgx-ib` (16 GPUs), `hgx-ib-N`, `nvl36` or `nvl72`.

    Raises:
        LayoutError: no such machine; the message names those that exist.
    """
    name = "hgx-ib-16" if name == "hgx-ib" else name
    if name in PRESETS:
        return PRESETS[name]
    count = name.removeprefix("hgx-ib-")
    if count != name and count.isdigit() and int(count):
        gpus = int(count)
        if gpus > 8 * HGX_NODES[-1]:
            raise LayoutError(f"{name}: presets end at {HGX_NODES[-1]} nodes, hgx-ib-{8 * HGX_NODES[-1]}")
        below, above = gpus // 8 * 8, -(-gpus // 8) * 8
        near = " or ".join(f"hgx-ib-{size}" for size in (below, above) if size)
        raise LayoutError(f"{name}: {gpus} GPUs are {gpus / 8:g} nodes of 8, and a node comes whole: use {near}")
    raise LayoutError(f"unknown mesh {name!r}: choose from hgx-ib, {', '.join(PRESETS)}")
