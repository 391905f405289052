"""The messages of a compiled program: what is sent along which mesh axes, by part of the model."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np

from kimi_jax.ledger.part import PARTS
from kimi_jax.parallel.messages import Kind, Message
from kimi_jax.profiling.hlo import COLLECTIVES, Instruction, Module, part_of
from meshes.topology import groups_along


@dataclasses.dataclass(frozen=True)
class Collective:
    """Messages of one kind, over one set of mesh axes, of one size and part."""

    kind: Kind
    axes: tuple[str, ...]
    bytes: int
    """Of one message: what a device contributes to a sum or sends, what it holds after a gather."""
    count: int
    part: str

    @property
    def message(self) -> Message:
        """One of them, as the ledger names messages."""
        return Message(self.part, self.kind, self.axes, self.bytes)


def collectives(module: Module, mesh: Mapping[str, int]) -> list[Collective]:
    """All messages of one execution, equal ones counted together. `mesh` has the axis sizes, outermost first."""
    counts: dict[tuple[Kind, tuple[str, ...], int, str], int] = {}
    for operands, instruction, count in _messages(module):
        kind = cast(Kind, instruction.opcode.removesuffix("-start"))
        sent = sum(operand.bytes for operand in operands)
        groups = replica_groups(instruction.attributes)
        size = len(groups[0]) if groups else math.prod(mesh.values())
        axes = mesh_axes(groups, mesh) if groups else tuple(mesh)
        key = (kind, axes, sent * size if kind == "all-gather" else sent, part_of(instruction.op_name))
        counts[key] = counts.get(key, 0) + count
    found = [Collective(kind, axes, size, count, part) for (kind, axes, size, part), count in counts.items()]
    return sorted(found, key=lambda c: (PARTS.index(c.part), c.kind, c.axes, c.bytes))


def _messages(module: Module) -> Iterator[tuple[list[Instruction], Instruction, int]]:
    """Collectives with their operands; XLA wraps those it has kernels of its own for in a fusion."""
    for computation, instruction, count in module.executed():
        inside = [computation]
        if instruction.opcode in ("fusion", "fusion-start"):
            inside = [called for _, called in instruction.called()]
            instructions = [i for called in inside for i in module.computations[called].values()]
        else:
            instructions = [instruction]
        for found in instructions:
            if found.opcode.removesuffix("-start") in COLLECTIVES:
                scope = module.computations[inside[0]]
                yield [scope[name] for name in found.operands], found, count


def replica_groups(attributes: str) -> list[tuple[int, ...]]:
    """Groups of device numbers that exchange messages, from any of XLA's three notations; [] means all together."""
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    if listed:
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d, ]+)\}", listed[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, dims = _numbers(iota[1]), _numbers(iota[2])
        order = _numbers(iota[3]) if iota[3] else tuple(range(len(dims)))
        devices = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)
        return _rows(devices)
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? ?\{([^}]*)\}", attributes)
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'?(\w+)'?=(\d+)", named[1])}
        return _rows(groups_along(sizes, re.findall(r"'?(\w+)'?", named[2])))
    return []


def mesh_axes(groups: list[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that groups of device numbers run along; axes of size 1 are left out.

    Raises:
      ValueError: groups that are no set of axes.
    """
    wanted = set(map(frozenset, groups))
    axes = [axis for axis, size in mesh.items() if size > 1]
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            if set(map(frozenset, _rows(groups_along(mesh, chosen)))) == wanted:
                return chosen
    raise ValueError(f"replica groups {groups[:2]}… of {len(groups)} run along no axes of the mesh {dict(mesh)}")


def _rows(devices: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(group) for group in devices.tolist()]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
