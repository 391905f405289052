"""What a layout may cut, as data: dimensions that axes must divide, and those that are padded until they do."""

import math
from collections.abc import Iterable, Sequence
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
