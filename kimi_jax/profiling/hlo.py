"""Reads a compiled program's text: its computations, how often each runs, and which argument a value is.

Parts are found through the named scopes that the model's code puts around its operations (`metadata op_name`), never
by guessing from shapes. Arrays are followed from the entry's parameters, whose `op_name` is their place in the
arguments, through loops and calls.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from kimi_jax.ledger.part import SCOPES
from kimi_jax.parallel.exchange.choice import OVERFLOW

_ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32,
    "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
)  # fmt: skip
FORWARDING = ("bitcast", "optimization-barrier", "copy-done", "all-gather-done", "all-reduce-done", "async-done")
"""Operations whose result is their first operand."""


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

    @property
    def target(self) -> str:
        """What a custom call calls; empty for anything else."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def fused(self) -> str:
        """The computation of a fusion.

        Raises:
          KeyError: for anything else.
        """
        return dict(self.called())["calls"]

    def called(self) -> list[tuple[str, str]]:
        """Computations it runs, as (attribute, name)."""
        calls = re.findall(r"\b(calls|body|condition|to_apply|called_computation)=%?([\w.\-]+)", self.attributes)
        for name, listed in re.findall(r"\b(branch_computations|called_computations)=\{([^}]*)\}", self.attributes):
            calls += [(name, branch.strip().lstrip("%")) for branch in listed.split(",")]
        calls += [
            ("branch", name) for name in re.findall(r"\b(?:true|false)_computation=%?([\w.\-]+)", self.attributes)
        ]
        return calls


def part_of(op_name: str) -> str:
    """The model part whose scope an operation stands in: the drafter keeps all its own, else the innermost counts."""
    scopes = _scopes(op_name)
    if "drafter" in scopes:
        return "drafter"
    return next((SCOPES[scope] for scope in reversed(scopes) if scope in SCOPES), "other")


def _scopes(op_name: str) -> list[str]:
    return [re.sub(r"^\w+\((.*)\)$", r"\1", scope) for scope in op_name.split("/")]


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


def inherit_scopes(computation: dict[str, Instruction]) -> None:
    """Gives an instruction without a name that of what it reads, else of what reads it.

    XLA's CPU compiler drops the metadata of every matrix product that it rewrites.
    """
    names = {i.name: i.op_name for i in computation.values() if i.opcode not in ("parameter", "tuple", "while")}
    for instruction in computation.values():
        if names.get(instruction.name) == "":
            read = (names.get(operand, "") for operand in instruction.operands)
            names[instruction.name] = next((name for name in read if part_of(name) != "other"), "")
    for instruction in reversed(computation.values()):
        for operand in instruction.operands:
            if names.get(operand) == "":
                names[operand] = names.get(instruction.name, "")
    for name, op_name in names.items():
        instruction = computation[name]
        if op_name != instruction.op_name:
            attributes = f'{instruction.attributes}, metadata={{op_name="{op_name}"}}'
            computation[name] = dataclasses.replace(instruction, attributes=attributes)


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
        for computation in self.computations.values():
            inherit_scopes(computation)

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

        A loop of unknown length counts once, and so does every branch of a choice; but of an exchange with bounded
        buffers only the usual branch, in which they hold all rows.
        """
        runs: dict[str, int] = {}

        def visit(name: str, count: int) -> None:
            runs[name] = runs.get(name, 0) + count
            for instruction in self.computations[name].values():
                if instruction.opcode in ("while", "call", "conditional", "async-start"):
                    known = re.search(r"known_trip_count\W+n\W+(\d+)", instruction.attributes)
                    for how, called in instruction.called():
                        if instruction.opcode == "conditional" and self._is_overflow(called):
                            continue
                        visit(called, count * (int(known[1]) if known and how == "body" else 1))

        visit(self.entry, 1)
        return runs

    def _is_overflow(self, branch: str) -> bool:
        return any(OVERFLOW in _scopes(instruction.op_name) for instruction in self.computations[branch].values())

    def executed(self) -> Iterator[tuple[str, Instruction, int]]:
        """Every instruction that the device is told to run, its computation, and how often (loops by trip count).

        Those of a step whose rows do not fit an exchange's buffers are left out.
        """
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
            elif instruction.opcode in FORWARDING and instruction.operands:
                name = instruction.operands[0]
            else:
                return None


def _place(op_name: str) -> str:
    """`parameters['target']['model']['layers'][3]['weight']` or `state.cache[0].latent` as a dotted path."""
    dotted = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", op_name)
    return dotted.removeprefix("parameters.")
