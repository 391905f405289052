"""PTX text as a list of instructions with resolved registers and branch targets.

Only the syntax is known here: what an instruction does stands in the tables of the other files.
"""

import dataclasses
import re
from collections.abc import Iterator

_TOKEN = re.compile(r"\s*([{};\[\],|:]|[^\s{};\[\],|:]+(?:::[^\s{};\[\],|:]+)*)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SIZES = {"b8": 1, "u8": 1, "b16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8}


class PtxError(Exception):
    """PTX that cannot be read or executed; the message names the line."""


@dataclasses.dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple["Operand", ...]


@dataclasses.dataclass(frozen=True)
class Address:
    """`[base + offset]`, or a tensor map's `[base, {coordinates}]`."""

    base: str
    offset: int = 0
    coordinates: Vector | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """`a|b`: two destinations."""

    first: str
    second: str


Operand = str | Vector | Address | Pair


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction; registers carry the name they were declared with, made unique where a scope declares them."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None
    negated: bool
    line: int
    target: int | None = None
    """Of a branch: the index of the instruction it goes to."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at its dots."""
        return tuple(self.opcode.split("."))

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"line {self.line}: {guard}{self.opcode} {', '.join(map(_text, self.operands))}"


@dataclasses.dataclass(frozen=True)
class Program:
    """An entry function. `registers` maps a name to its width in bits (1 for a predicate)."""

    name: str
    target: str
    instructions: tuple[Instruction, ...]
    registers: dict[str, int]
    parameters: dict[str, int]
    """Byte offset of each parameter in parameter memory."""
    parameter_bytes: int
    shared: dict[str, int]
    """Byte offset of each variable in shared memory; dynamic memory begins after the last."""
    shared_bytes: int


def _text(operand: Operand) -> str:
    match operand:
        case Vector(items):
            return "{" + ", ".join(map(_text, items)) + "}"
        case Address(base, offset, coordinates):
            return f"[{base}{f'+{offset}' if offset else ''}{f', {_text(coordinates)}' if coordinates else ''}]"
        case Pair(first, second):
            return f"{first}|{second}"
    return operand


def parse(text: str) -> Program:
    """Read the one entry function of a module.

    Raises:
        PtxError: there is no entry function, or a statement cannot be read.
    """
    # Comments become spaces of the same number of lines, so that messages name the module's lines.
    text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", text, re.DOTALL)
    if entry is None:
        raise PtxError("the module has no .entry function")
    parameters, parameter_bytes = _variables(re.split(r",(?![^<]*>)", entry[2]), r"\.param")
    target = re.search(r"\.target\s+(\w+)", text)
    reader = _Reader(text, entry.end())
    shared, shared_bytes = _variables(reader.shared, r"\.shared")
    instructions = [reader.resolve(instruction, scopes) for instruction, scopes in reader.found]
    return Program(
        entry[1],
        target[1] if target else "",
        tuple(instructions),
        reader.registers,
        parameters,
        parameter_bytes,
        shared,
        shared_bytes,
    )


def _variables(declarations: list[str], space: str) -> tuple[dict[str, int], int]:
    """Offsets of variables laid one after another, and the bytes they take."""
    offsets, end = {}, 0
    for declaration in declarations:
        if not declaration.strip():
            continue
        name = re.search(r"([\w$]+)\s*(?:\[(\d*)\])?\s*$", declaration.strip())
        kind = re.search(r"\.([bus]8|[busf](?:16|32|64))\b", declaration)
        align = re.search(r"\.align\s+(\d+)\s+\.b8", declaration)
        if name is None or kind is None or not re.search(space, declaration):
            raise PtxError(f"cannot read the declaration {declaration.strip()!r}")
        size = int(re.sub(r"\D", "", kind[1])) // 8
        alignment = int(align[1]) if align else size
        count = 1 if name[2] is None and "demoted" not in declaration else int(name[2] or 0)
        end = -(-end // alignment) * alignment
        offsets[name[1]] = end
        end += size * count
    return offsets, end


class _Reader:
    """Statements of a function body, with nested scopes of registers and labels."""

    def __init__(self, text: str, start: int) -> None:
        self.text, self.position = text, start
        self.line = text.count("\n", 0, start) + 1
        self.registers: dict[str, int] = {}
        self.shared: list[str] = []
        self.labels: dict[tuple[int, str], int] = {}
        self.names: dict[tuple[int, str], str] = {}
        self.ranges: list[tuple[int, str]] = []
        self.found: list[tuple[Instruction, tuple[int, ...]]] = []
        scopes, self.scope_count = [0], 1
        while scopes:
            token = self.peek()
            if token == "{":
                self.next()
                scopes.append(self.scope_count)
                self.scope_count += 1
            elif token == "}":
                self.next()
                scopes.pop()
            elif token == ";":
                self.next()
            elif token.startswith("."):
                self.directive(scopes)
            else:
                self.statement(scopes)

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            raise PtxError(f"line {self.line}: the function does not end")
        return match[1]

    def next(self) -> str:
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            raise PtxError(f"line {self.line}: the statement does not end")
        self.line += self.text.count("\n", self.position, match.end())
        self.position = match.end()
        return match[1]

    def directive(self, scopes: list[int]) -> None:
        # Line directives end with their line, others with a semicolon.
        start = self.position
        word = self.next()
        if word in (".loc", ".file", ".pragma") and word != ".pragma":
            end = self.text.index("\n", self.position)
        else:
            end = self.text.index(";", self.position) + 1
        statement = self.text[start:end].strip().rstrip(";")
        self.line += self.text.count("\n", self.position, end)
        self.position = end
        if word == ".reg":
            self.declare(statement, scopes[-1])
        elif word == ".shared":
            # A variable without a size is the dynamic memory.
            dynamic = re.search(r"\.b8\s+[\w$]+$", statement)
            self.shared.append(f"{statement}[]" if dynamic else statement)
        elif word not in (".loc", ".pragma", ".file"):
            raise PtxError(f"line {self.line}: unknown directive {word}")

    def declare(self, statement: str, scope: int) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", statement, re.DOTALL).groups()  # pyright: ignore
        width = 1 if kind == "pred" else int(re.sub(r"\D", "", kind))
        for name in names.split(","):
            if counted := re.match(r"\s*(\S+)<(\d+)>", name):
                self.registers.update({f"{counted[1]}{i}": width for i in range(int(counted[2]))})
            else:
                unique = name.strip() if scope == 0 else f"{name.strip()}#{scope}"
                self.names[scope, name.strip()] = unique
                self.registers[unique] = width

    def statement(self, scopes: list[int]) -> None:
        guard, negated, line = None, False, None
        word = self.next()
        line = self.line
        if self.peek() == ":":
            self.next()
            self.labels[scopes[-1], word] = len(self.found)
            return
        if word.startswith("@"):
            negated = word.startswith("@!")
            guard = self.rename(word.lstrip("@!"), scopes)
            word = self.next()
        operands = []
        while (token := self.peek()) != ";":
            if token == ",":
                self.next()
            else:
                operands.append(self.operand(scopes))
        self.next()
        self.found.append((Instruction(word, tuple(operands), guard, negated, line), tuple(scopes)))

    def operand(self, scopes: list[int]) -> Operand:
        token = self.next()
        if token == "{":
            items = []
            while self.peek() != "}":
                items.append(self.operand(scopes))
                if self.peek() == ",":
                    self.next()
            self.next()
            return Vector(tuple(items))
        if token == "[":
            return self.address(scopes)
        name = self.rename(token, scopes)
        if self.peek() == "|":
            self.next()
            return Pair(name, self.rename(self.next(), scopes))
        return name

    def address(self, scopes: list[int]) -> Address:
        words, coordinates = "", None
        while (token := self.next()) != "]":
            if token == ",":
                vector = self.operand(scopes)
                assert isinstance(vector, Vector)
                coordinates = vector
            else:
                words += token
        base, sign, offset = re.match(r"([^+]+?)(?:(\+)(-?\w+))?$", words).groups()  # pyright: ignore
        return Address(self.rename(base, scopes), int(offset, 0) if sign else 0, coordinates)

    def rename(self, name: str, scopes: list[int]) -> str:
        return next((self.names[s, name] for s in reversed(scopes) if (s, name) in self.names), name)

    def resolve(self, instruction: Instruction, scopes: tuple[int, ...]) -> Instruction:
        if instruction.parts[0] != "bra":
            return instruction
        label = str(instruction.operands[0])
        target = next((self.labels[s, label] for s in reversed(scopes) if (s, label) in self.labels), None)
        if target is None:
            raise PtxError(f"{instruction}: there is no such label")
        return dataclasses.replace(instruction, target=target)


def registers_of(operand: Operand) -> Iterator[str]:
    """The names in an operand."""
    match operand:
        case Vector(items):
            for item in items:
                yield from registers_of(item)
        case Address(base, _, coordinates):
            yield base
            if coordinates is not None:
                yield from registers_of(coordinates)
        case Pair(first, second):
            yield from (first, second)
        case str():
            yield operand
