"""From an instruction's text to a function that executes it for all threads of a group at once.

Every operand of a thread is a row of an array over threads: a register, and just so a constant, a special register or
the address of a variable, which are rows that never change. A decoded instruction is a closure over row numbers.
"""

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.parser import Address, Instruction, Operand, Pair, Program, PtxError, Vector

DTYPES = {
    "pred": np.bool_,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
}
KINDS = {name: number for number, name in enumerate(DTYPES)}
"""Views of a register: the number of each is its place in a `Frame`."""
WIDTHS = {"pred": 1, **{name: int(name[1:]) for name in DTYPES if name != "pred"}}
CLASSES = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
"""Arrays that hold registers, by their width in bits."""

SPECIAL = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid", "clusterid")
      for axis in "xyz"),
    "%laneid", "%cluster_ctarank", "%cluster_nctarank", "%warpid",
)  # fmt: skip

Run = Callable[[Any, Any], Any]
"""What a decoded instruction does: (frame, where), `where` being True or a mask over the frame's threads."""


def kind_of(type_name: str) -> int:
    """The view for a PTX type: untyped bits are read as unsigned."""
    name = {"b16": "u16", "b32": "u32", "b64": "u64", "pred": "pred", "b8": "u16", "u8": "u16"}.get(
        type_name, type_name
    )
    if name not in KINDS:
        raise PtxError(f"type .{type_name} is not known")
    return KINDS[name]


@dataclasses.dataclass
class Decoded:
    """An instruction ready to run. `control` says that it decides where its group goes on (see `machine`)."""

    run: Run
    guard: int | None
    negated: bool
    control: bool
    instruction: Instruction


class Decoder:
    """Assigns rows to what instructions name, and decodes them by the tables."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rows: dict[str, tuple[int, int]] = {}
        self.constants: dict[int, list[Any]] = {width: [] for width in CLASSES}
        self.counts = dict.fromkeys(CLASSES, 0)
        self.specials: list[tuple[int, int, str]] = []
        self.addresses: list[tuple[int, int, str]] = []
        self._constant_rows: dict[Any, int] = {}
        from ptx import tables

        self.code = [self.decode(i, tables.TABLE) for i in program.instructions]

    def decode(self, instruction: Instruction, table: dict[str, Any]) -> Decoded:
        """Find the longest prefix of the opcode that the table has, and let its entry read the rest."""
        parts = instruction.parts
        for length in range(len(parts), 0, -1):
            entry = table.get(".".join(parts[:length]))
            if entry is not None:
                break
        else:
            raise PtxError(f"{instruction}: the instruction {instruction.opcode!r} is not known")
        function, control = entry
        try:
            run = function(self, instruction, parts[length:])
        except PtxError as error:
            raise PtxError(f"{instruction}: {error}") from None
        guard = None if instruction.guard is None else self.read(instruction.guard, KINDS["pred"])
        return Decoded(run, guard, instruction.negated, control, instruction)

    def row(self, width: int) -> int:
        """A new row of a class."""
        self.counts[width] += 1
        return self.counts[width] - 1

    def read(self, operand: Operand, kind: int) -> int:
        """The row of an operand that is read as `kind`."""
        if not isinstance(operand, str):
            raise PtxError(f"operand {operand} is not a scalar")
        width = WIDTHS[list(DTYPES)[kind]]
        if operand in self.program.registers:
            return self.register(operand, width)
        return self._constant(operand, kind, width)

    def write(self, operand: Operand, kind: int) -> int:
        """The row of a register that is written as `kind`."""
        if operand == "_":
            return self.row(WIDTHS[list(DTYPES)[kind]])
        if not isinstance(operand, str) or operand not in self.program.registers:
            raise PtxError(f"operand {operand} is not a register")
        return self.register(operand, WIDTHS[list(DTYPES)[kind]])

    def register(self, name: str, width: int) -> int:
        """The row of a register of this width."""
        declared = min(self.program.registers[name], 64)  # of 128 bits only the low half is held
        if declared != width:
            raise PtxError(f"register {name} has {declared} bits, not {width}")
        if name not in self.rows:
            self.rows[name] = (width, self.row(width))
        return self.rows[name][1]

    def width(self, operand: Operand) -> int | None:
        """Declared bits of a register; None for anything else."""
        return self.program.registers.get(operand) if isinstance(operand, str) else None

    def _constant(self, text: str, kind: int, width: int) -> int:
        key = (text, kind)
        if key in self._constant_rows:
            return self._constant_rows[key]
        row = self._constant_rows[key] = self.row(width)
        if text in SPECIAL:
            self.specials.append((width, row, text))
        elif text in self.program.shared or text in self.program.parameters:
            self.addresses.append((width, row, text))
        else:
            self.constants[width].append((row, _bits(text, width)))
        return row

    def address(self, operand: Operand) -> tuple[int, int, np.uint64]:
        """Kind and row of an address's base, and the offset to add."""
        if not isinstance(operand, Address):
            raise PtxError(f"operand {operand} is not an address")
        kind = KINDS["u32"] if self.width(operand.base) == 32 else KINDS["u64"]
        return kind, self.read(operand.base, kind), np.uint64(operand.offset & (2**64 - 1))


def addresses(frame: Any, address: tuple[int, int, np.uint64]) -> np.ndarray:
    """The addresses of all threads, as unsigned 64-bit numbers."""
    kind, row, offset = address
    base = frame[kind][row]
    if kind != KINDS["u64"]:
        base = base.astype(np.uint64)
    return base + offset if offset else base


def immediate(operand: Operand) -> int:
    """The value of an operand that must be a literal."""
    if not isinstance(operand, str):
        raise PtxError(f"operand {operand} is not a literal")
    try:
        return int(operand.rstrip("U"), 0)
    except ValueError:
        raise PtxError(f"operand {operand} is not a literal") from None


def items(operand: Operand) -> tuple[Operand, ...]:
    """The parts of a vector operand; a scalar is its own only part."""
    return operand.items if isinstance(operand, Vector) else (operand,)


def pair(operand: Operand) -> tuple[str, str]:
    """Both destinations of an operand `a|b`; `_` where the second is absent."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    assert isinstance(operand, str)
    return operand, "_"


def _bits(text: str, width: int) -> Any:
    if width == 1:
        return immediate(text) != 0
    if text.startswith(("0f", "0F")):
        return int(text[2:], 16)
    if text.startswith(("0d", "0D")):
        value = int(text[2:], 16)
        if width == 64:
            return value
        return struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", value))[0]))[0]
    return immediate(text) & ((1 << width) - 1)
