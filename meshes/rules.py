"""What a layout may cut, as data: dimensions that axes must divide, and those that are padded until they do."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshes.presets import Layout, LayoutError


@dataclass(frozen=True)
class Dimension:
    """Something that mesh axes share."""

    name: str
    size: int
    axes: tuple[str, ...]
    padded: bool = False
    """Filled up to a multiple of the ranks; else a layout whose ranks do not divide it is refused."""

    def ranks(self, layout: Layout) -> int:
        """Devices among which it is shared."""
        return math.prod(layout.axis_sizes[axis] for axis in self.axes)

    def each(self, layout: Layout) -> int:
        """Of one rank, padding included."""
        return -(-self.size // self.ranks(layout))

    def fits(self, layout: Layout) -> bool:
        """Whether the layout is allowed to cut it."""
        return self.padded or self.size % self.ranks(layout) == 0


def model_dimensions(
    layout: Layout,
    *,
    num_heads: int,
    widths: Mapping[str, int],
    vocab_size: int,
    expert_width: int,
    group_size: int,
    num_experts: int | None = None,
) -> list[Dimension]:
    """What a layout cuts of a model's weights. All sizes are plain numbers.

    widths: names and sizes of the dense dimensions that are split on tp (shared expert, dense layers).
    expert_width: the routed experts' inner size, cut on tp only when `layout.experts` is `width`, and then only
    between quantisation groups of `group_size`.
    num_experts: routed experts of a layer; their slots are padded, so they never refuse a layout.
    """
    sizes = {"attention heads": num_heads, "vocabulary": vocab_size, **widths}
    if layout.experts == "width":
        sizes[f"expert width in groups of {group_size}"] = expert_width // group_size
    cut = [Dimension(name, size, ("tp",)) for name, size in sizes.items()]
    if num_experts is None:
        return cut
    return [*cut, Dimension("routed experts", num_experts, layout.expert_axes, padded=True)]


def check_layout(
    layout: Layout,
    *,
    num_heads: int,
    widths: Mapping[str, int],
    vocab_size: int,
    expert_width: int,
    group_size: int,
) -> None:
    """Refuse a layout that would cut a weight of the model unevenly; arguments as for `model_dimensions`.

    Raises:
        LayoutError: as `check_dimensions`.
    """
    check_dimensions(
        layout,
        model_dimensions(
            layout, num_heads=num_heads, widths=widths, vocab_size=vocab_size, expert_width=expert_width,
            group_size=group_size,
        ),
    )  # fmt: skip


def check_dimensions(layout: Layout, dimensions: Sequence[Dimension]) -> None:
    """Refuse a layout that does not divide what it must.

    Raises:
        LayoutError: naming each dimension that tp does not divide, the tp sizes that work and the nearest layouts.
    """
    bad = [f"{dimension.name} {dimension.size}" for dimension in dimensions if not dimension.fits(layout)]
    if bad:
        works = ", ".join(map(str, working_tp(dimensions)))
        near = ", ".join(_with_unused(other, layout.num_devices) for other in nearest(layout, dimensions))
        raise LayoutError(
            f"tp {layout.tp} does not divide {', '.join(bad)}: tp sizes that work are {works}; nearest layouts: {near}"
        )


def working_tp(dimensions: Iterable[Dimension]) -> list[int]:
    """Sizes of tp that divide all that tp must."""
    common = math.gcd(*(dimension.size for dimension in dimensions if "tp" in dimension.axes and not dimension.padded))
    return [tp for tp in range(1, common + 1) if common % tp == 0]


def nearest(layout: Layout, dimensions: Iterable[Dimension]) -> list[Layout]:
    """Layouts that work on as many devices or fewer, with the next tp below and above; ep takes what is left."""
    works, most = working_tp(dimensions), layout.num_devices // layout.dp
    below = [tp for tp in works if tp <= layout.tp][-1:]
    above = [tp for tp in works if layout.tp < tp <= most][:1]
    return [replace(layout, ep=most // tp, tp=tp) for tp in (*below, *above)]


def _with_unused(layout: Layout, devices: int) -> str:
    return str(layout) if layout.num_devices == devices else f"{layout} ({layout.num_devices} of {devices} devices)"
