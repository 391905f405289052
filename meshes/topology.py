"""How a machine's GPUs are joined, and which link a mesh axis crosses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

LinkKind = Literal["none", "local", "network"]
"""`none`: one GPU, nothing to cross. `local`: NVLink, or PCIe inside a node. `network`: InfiniBand."""


@dataclass(frozen=True)
class Topology:
    """Nodes and domains, numbered so that a node's GPUs, and a domain's nodes, are neighbours.

    A node is what one operating system sees. A domain is the set of GPUs that reach each other without the
    network: the eight GPUs of an HGX node, or a whole NVL72 rack of 18 nodes with four GPUs each.
    """

    num_gpus: int
    gpus_per_node: int
    gpus_per_domain: int

    @property
    def num_nodes(self) -> int:
        """Operating systems in the machine."""
        return self.num_gpus // self.gpus_per_node

    @property
    def num_domains(self) -> int:
        """NVLink (or PCIe) islands in the machine."""
        return self.num_gpus // self.gpus_per_domain


@dataclass(frozen=True)
class AxisSpan:
    """What a collective over some mesh axes crosses: its group of `size` GPUs lies in `domains` domains."""

    size: int
    domains: int

    @property
    def size_per_domain(self) -> int:
        """GPUs of one group that share a domain."""
        return self.size // self.domains

    @property
    def link(self) -> LinkKind:
        """The slowest link the group needs."""
        if self.size == 1:
            return "none"
        return "local" if self.domains == 1 else "network"


def axis_span(axis_sizes: dict[str, int], axes: tuple[str, ...], topology: Topology) -> AxisSpan:
    """Find what a group along `axes` crosses when the mesh's last axis is innermost in the machine.

    `axis_sizes` lists all mesh axes, outermost first. The group with the most domains counts.

    Raises:
      ValueError: an axis is not in the mesh.
    """
    for axis in axes:
        if axis not in axis_sizes:
            raise ValueError(f"no mesh axis {axis!r}: the axes are {', '.join(axis_sizes)}")
    groups = groups_along(axis_sizes, axes)
    domains = groups // topology.gpus_per_domain
    changes = np.diff(np.sort(domains, axis=1), axis=1) > 0
    return AxisSpan(groups.shape[1], domains=1 + int(changes.sum(axis=1).max()))


def groups_along(axis_sizes: Mapping[str, int], axes: Sequence[str]) -> np.ndarray:
    """Device numbers `[groups, size]` of the groups along some axes, the mesh's last axis being innermost."""
    names = list(axis_sizes)
    inside = [names.index(axis) for axis in axes]
    outside = [i for i in range(len(names)) if i not in inside]
    index = np.arange(math.prod(axis_sizes.values())).reshape(tuple(axis_sizes.values()))
    return index.transpose(*outside, *inside).reshape(-1, math.prod(axis_sizes[axis] for axis in axes))
