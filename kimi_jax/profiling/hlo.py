"""Reads a compiled program's text: messages, kernels, reads and copies of large arrays, each with its model part.

Parts are found through the named scopes that the model's code puts around its operations (`metadata op_name`), never
by guessing from shapes. Arrays are followed from the entry's parameters, whose `op_name` is their place in the
arguments, through loops and calls.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

PARTS = (
    "attention", "router", "experts", "shared_expert", "dense", "head", "drafter", "tree", "exchange", "reductions",
    "other",
)  # fmt: skip
"""In the order of a table; `other` is embedding, final norm, sampling, and what commits a round."""

_ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
)  # fmt: skip
_FORWARDING = ("bitcast", "optimization-barrier", "copy-done", "all-gather-done", "all-reduce-done", "async-done")
_SLICES = ("slice", "dynamic-slice", "gather")
_IN_PLACE = ("scatter", "dynamic-update-slice")
_FREE = ("parameter", "tuple", "get-tuple-element", "constant", *_FORWARDING)
_LAYOUT_ONLY = (
    "parameter", "bitcast", "copy", "slice", "dynamic-slice", "transpose", "reshape", "concatenate", "pad", "constant",
    "tuple", "get-tuple-element", "convert", "broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array type."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * _ITEM_BITS.get(self.dtype, 0) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    opcode: str
    results: tuple[Buffer, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    argument: str
    """What stands in the parentheses, as text: the number of a parameter."""

    @property
    def bytes(self) -> int:
        """Of all results."""
        return sum(buffer.bytes for buffer in self.results)

    @property
    def op_name(self) -> str:
        """Path of named scopes and the operation it came from."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    def called(self) -> list[tuple[str, str]]:
        """Computations it runs, as (attribute, name)."""
        calls = re.findall(r"\b(calls|body|condition|to_apply|called_computation)=%?([\w.\-]+)", self.attributes)
        for name, listed in re.findall(r"\b(branch_computations|called_computations)=\{([^}]*)\}", self.attributes):
            calls += [(name, branch.strip().lstrip("%")) for branch in listed.split(",")]
        calls += [
            ("branch", name) for name in re.findall(r"\b(?:true|false)_computation=%?([\w.\-]+)", self.attributes)
        ]
        return calls


@dataclasses.dataclass(frozen=True)
class Collective:
    """Messages of one kind, over one set of mesh axes, of one size and part."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    """Of one message: what a device contributes to a sum or sends, what it holds after a gather."""
    count: int
    part: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Hand-written kernels of one name in one part."""

    name: str
    part: str
    count: int


@dataclasses.dataclass(frozen=True)
class Materialised:
    """A part of a weight or of the cache that the program writes to memory again before it uses it."""

    array: str
    operation: str
    bytes: int
    part: str


def part_of(op_name: str) -> str:
    """The model part whose scope an operation stands in: the drafter keeps all its own, else the innermost counts."""
    scopes = [re.sub(r"^\w+\((.*)\)$", r"\1", scope) for scope in op_name.split("/")]
    if "drafter" in scopes:
        return "drafter"
    return next((scope for scope in reversed(scopes) if scope in PARTS), "other")


@functools.lru_cache(maxsize=65536)
def _buffers(text: str) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(dtype, tuple(int(size.strip("<=")) for size in dims.split(",") if size))
        for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,<=]*)\]", text)
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = re.match(r" ([\w\-]+)\(", rest[end:])
    if opcode is None:
        return None
    opening = end + opcode.end() - 1
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) if opcode[1] != "constant" else ()
    return Instruction(
        head[2], opcode[1], _buffers(rest[:end]), operands, rest[closing + 1 :], bool(head[1]), inside
    )  # fmt: skip


class Module:
    """A compiled program's computations.

    Raises:
      ValueError: text without an entry computation.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] | None = None
        for line in text.splitlines():
            opened = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if opened and " = " not in line.split("(")[0]:
                current = self.computations.setdefault(opened[2], {})
                if opened[1]:
                    self.entry = opened[2]
            elif current is not None and (instruction := _instruction(line)):
                current[instruction.name] = instruction
        if not self.entry:
            raise ValueError("the text holds no ENTRY computation: is it a compiled program's as_text()?")

    @functools.cached_property
    def _callers(self) -> dict[str, list[tuple[str, Instruction, str]]]:
        callers: dict[str, list[tuple[str, Instruction, str]]] = {}
        for name, computation in self.computations.items():
            for instruction in computation.values():
                for how, called in instruction.called():
                    callers.setdefault(called, []).append((name, instruction, how))
        return callers

    @functools.cached_property
    def _runs(self) -> dict[str, int]:
        """How often each computation that is not a fusion's or reducer's runs.

        A loop of unknown length counts once, and so does every branch of a choice.
        """
        runs: dict[str, int] = {}

        def visit(name: str, count: int) -> None:
            runs[name] = runs.get(name, 0) + count
            for instruction in self.computations[name].values():
                if instruction.opcode in ("while", "call", "conditional", "async-start"):
                    known = re.search(r"known_trip_count\W+n\W+(\d+)", instruction.attributes)
                    for how, called in instruction.called():
                        visit(called, count * (int(known[1]) if known and how == "body" else 1))

        visit(self.entry, 1)
        return runs

    def executed(self) -> Iterator[tuple[str, Instruction, int]]:
        """Every instruction that the device is told to run, its computation, and how often (loops by trip count)."""
        for name, count in self._runs.items():
            for instruction in self.computations[name].values():
                yield name, instruction, count

    @functools.cached_property
    def arguments(self) -> dict[str, str]:
        """Entry parameters by instruction name, to their place in the arguments (`target.model.layers.3…`)."""
        found = {}
        for instruction in self.computations[self.entry].values():
            if instruction.opcode == "parameter":
                found[instruction.name] = _place(instruction.op_name)
        return found

    def root(self, computation: str) -> Instruction:
        """The instruction whose result a computation returns."""
        return next(i for i in self.computations[computation].values() if i.is_root)

    def source(self, computation: str, name: str, index: int | None = None) -> str | None:
        """The argument that a value is, whole, or None; what a loop carries is what went into it."""
        while True:
            instruction = self.computations[computation].get(name)
            if instruction is None:
                return None
            if instruction.opcode == "parameter":
                if computation == self.entry:
                    return self.arguments[name]
                callers = self._callers.get(computation, [])
                if len({id(call) for _, call, _ in callers}) != 1:  # none, or called from several places
                    return None
                caller, call, _ = callers[0]
                number = int(instruction.argument)
                if call.opcode == "conditional":
                    branches = [called for _, called in call.called()]
                    number = branches.index(computation) + 1
                if number >= len(call.operands):
                    return None
                computation, name = caller, call.operands[number]
            elif instruction.opcode == "get-tuple-element":
                found = re.search(r"index=(\d+)", instruction.attributes)
                if found is None:
                    return None
                name, index = instruction.operands[0], int(found[1])
            elif instruction.opcode == "tuple" and index is not None:
                name, index = instruction.operands[index], None
            elif instruction.opcode in _FORWARDING and instruction.operands:
                name = instruction.operands[0]
            else:
                return None

    def collectives(self, mesh: Mapping[str, int]) -> list[Collective]:
        """All messages of one execution, equal ones counted together. `mesh` has the axis sizes, outermost first."""
        counts: dict[tuple[str, tuple[str, ...], int, str], int] = {}
        for operands, instruction, count in self._messages():
            kind = instruction.opcode.removesuffix("-start")
            sent = sum(operand.bytes for operand in operands)
            groups = replica_groups(instruction.attributes)
            size = len(groups[0]) if groups else math.prod(mesh.values())
            axes = mesh_axes(groups, mesh) if groups else tuple(mesh)
            key = (kind, axes, sent * size if kind == "all-gather" else sent, part_of(instruction.op_name))
            counts[key] = counts.get(key, 0) + count
        found = [Collective(kind, axes, size, count, part) for (kind, axes, size, part), count in counts.items()]
        return sorted(found, key=lambda c: (PARTS.index(c.part), c.kind, c.axes, c.bytes))

    def _messages(self) -> Iterator[tuple[list[Instruction], Instruction, int]]:
        """Collectives with their operands; XLA wraps those it has kernels of its own for in a fusion."""
        for computation, instruction, count in self.executed():
            inside = [computation]
            if instruction.opcode in ("fusion", "fusion-start"):
                inside = [called for _, called in instruction.called()]
                instructions = [i for called in inside for i in self.computations[called].values()]
            else:
                instructions = [instruction]
            for found in instructions:
                if found.opcode.removesuffix("-start") in _COLLECTIVES:
                    scope = self.computations[inside[0]]
                    yield [scope[name] for name in found.operands], found, count

    def kernels(self) -> list[Kernel]:
        """Pallas kernels, by part."""
        counts: dict[tuple[str, str], int] = {}
        for _, instruction, count in self.executed():
            if instruction.opcode == "custom-call" and "mosaic" in _target(instruction):
                key = (_kernel_name(instruction), part_of(instruction.op_name))
                counts[key] = counts.get(key, 0) + count
        return sorted((Kernel(name, part, n) for (name, part), n in counts.items()), key=lambda k: (k.part, k.name))

    def custom_calls(self) -> dict[str, int]:
        """All custom calls by target."""
        counts: dict[str, int] = {}
        for _, instruction, count in self.executed():
            if instruction.opcode == "custom-call":
                counts[_target(instruction)] = counts.get(_target(instruction), 0) + count
        return counts

    def host_transfers(self) -> list[str]:
        """Instructions that send to or wait for the host: callbacks, infeed, outfeed, copies to host memory."""
        found = []
        for _, instruction, _ in self.executed():
            callback = instruction.opcode == "custom-call" and "callback" in _target(instruction)
            # S(5) is XLA's host memory space.
            to_host = "S(5)" in instruction.attributes and instruction.opcode.startswith("copy")
            if callback or to_host or instruction.opcode in ("infeed", "outfeed", "send", "recv"):
                found.append(f"{instruction.opcode} {instruction.name} ({instruction.op_name})")
        return found

    def reads(self) -> dict[tuple[str, str], int]:
        """Bytes that instructions read of each argument, by (argument, part); a slice inside a fusion reads its size.

        A kernel is taken to read its whole operand once, also one that it is given twice.
        """
        totals: dict[tuple[str, str], int] = {}
        for computation, instruction, count in self.executed():
            if instruction.opcode in _FREE or instruction.opcode in ("while", "call", "conditional"):
                continue
            for name in dict.fromkeys(instruction.operands):
                source = self.source(computation, name)
                if source is None:
                    continue
                number = instruction.operands.index(name)
                key = (source, part_of(instruction.op_name))
                totals[key] = totals.get(key, 0) + count * self._read(computation, instruction, number)
        return totals

    def _read(self, computation: str, instruction: Instruction, number: int) -> int:
        whole = self.computations[computation][instruction.operands[number]].bytes
        if instruction.opcode in _SLICES and number == 0:
            return instruction.bytes
        if instruction.opcode in _IN_PLACE and number == 0:
            return 0
        if instruction.opcode != "fusion":
            return whole
        inner = self.computations[dict(instruction.called())["calls"]]
        parameter = next(i for i in inner.values() if i.opcode == "parameter" and int(i.argument) == number)
        return min(whole, self._read_inside(inner, parameter.name, whole))

    def _read_inside(self, inner: Mapping[str, Instruction], name: str, whole: int) -> int:
        total = 0
        for user in (i for i in inner.values() if name in i.operands):
            if user.opcode in _SLICES and user.operands[0] == name:
                total += user.bytes
            elif user.opcode == "bitcast":
                total += self._read_inside(inner, user.name, whole)
            elif user.opcode not in _IN_PLACE or user.operands[0] != name:
                return whole
        return total

    def materialised(self, smallest: int = 1 << 20, share: float = 1 / 16) -> list[Materialised]:
        """Copies, slices and conversions of arguments of at least `smallest` bytes and this share of the array.

        What is updated in place (the cache's commit) is none: XLA puts a copy of its own where it cannot.
        """
        found = []
        for computation, instruction, _ in self.executed():
            if instruction.opcode not in ("copy", "copy-start", "fusion", "transpose", *_SLICES, "convert"):
                continue
            if instruction.opcode == "fusion" and not self._only_moves(instruction):
                continue
            for name in instruction.operands:
                source = self.source(computation, name)
                if source is None:
                    continue
                whole = self.computations[computation][name].bytes
                written = instruction.results[0].bytes if instruction.opcode == "copy-start" else instruction.bytes
                if written >= max(smallest, share * whole):
                    # What joins several arrays writes each of them once.
                    size = min(written, whole)
                    found.append(Materialised(source, instruction.name, size, part_of(instruction.op_name)))
        return found

    def _only_moves(self, fusion: Instruction) -> bool:
        inner = self.computations[dict(fusion.called())["calls"]].values()
        return all(i.opcode in _LAYOUT_ONLY for i in inner)


def _target(instruction: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return found[1] if found else ""


def _kernel_name(instruction: Instruction) -> str:
    # Pallas ends the path with the operation that launches; the scope before it is the kernel's own name.
    scopes = [scope for scope in instruction.op_name.split("/") if scope not in ("", "mpmd_map", "pallas_call")]
    return scopes[-1] if scopes else instruction.name


def _place(op_name: str) -> str:
    """`parameters['target']['model']['layers'][3]['weight']` or `state.cache[0].latent` as a dotted path."""
    dotted = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", op_name)
    return dotted.removeprefix("parameters.")


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
        return [tuple(int(device) for device in group) for group in devices]
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))? ?\{([^}]*)\}", attributes)
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'?(\w+)'?=(\d+)", named[1])}
        names = re.findall(r"'?(\w+)'?", named[2])
        axes = list(sizes)
        index = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        inside = [axes.index(axis) for axis in names]
        outside = [i for i in range(len(axes)) if i not in inside]
        devices = index.transpose(*outside, *inside).reshape(-1, math.prod(sizes[axis] for axis in names))
        return [tuple(int(device) for device in group) for group in devices]
    return []


def mesh_axes(groups: list[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that groups of device numbers run along; axes of size 1 are left out.

    Raises:
      ValueError: groups that are no set of axes.
    """
    wanted = {frozenset(group) for group in groups}
    axes = [axis for axis, size in mesh.items() if size > 1]
    index = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    names = list(mesh)
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            inside = [names.index(axis) for axis in chosen]
            outside = [i for i in range(len(names)) if i not in inside]
            size = math.prod(mesh[axis] for axis in chosen)
            rows = index.transpose(*outside, *inside).reshape(-1, size)
            if {frozenset(int(device) for device in row) for row in rows} == wanted:
                return chosen
    raise ValueError(f"replica groups {groups[:2]}… of {len(groups)} run along no axes of the mesh {dict(mesh)}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
