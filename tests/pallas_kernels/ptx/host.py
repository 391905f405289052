"""What the host does before a launch: the LLVM IR of Mosaic's host function, executed.

It is straight-line code that builds the tensor maps and the launch's sizes in memory of its own, and hands them to two
functions of the runtime. Executing it gives a launch exactly as a card's driver would get it. Since jax 0.12 it
describes the launch (`mosaic_gpu_build_kernel_spec`), before that it launches (`mosaic_gpu_launch_kernel`).
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ptx.machine import Launch
from ptx.memory import DESCRIPTOR_BYTES, PARAMETERS, Bytes, TensorMap, buffer_address
from ptx.parser import Program, PtxError

_ELEMENT_BYTES = {1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 2, 9: 4, 10: 8}
"""Mosaic's numbers of element types: integers of 8 to 64 bits, f16, f32, bf16, signed integers."""
_BUFFERS, _SPEC, _STREAM = 1 << 32, 1 << 33, 1 << 34


def launch(ir: str, program: Program, buffers: Sequence[Bytes]) -> Launch:
    """The launch that a host function makes when it is called with these buffers of global memory.

    Raises:
        PtxError: the function does what is not known here; the message has its line.
    """
    host = _Host(tuple(buffers))
    host.execute(ir, program.name.removesuffix("_kernel"))
    if host.spec is None:
        raise PtxError("the host function launches nothing")
    parameters = np.full(max(program.parameter_bytes, 1), 0xFF, np.uint8)
    maps: dict[int, TensorMap] = {}
    offsets = list(program.parameters.values())
    if len(offsets) != len(host.values):
        raise PtxError(f"the kernel has {len(offsets)} parameters, the launch gives {len(host.values)}")
    for offset, value in zip(offsets, host.values, strict=True):
        if isinstance(value, _Object):  # tensor maps one after another
            for at in range(0, value.size, DESCRIPTOR_BYTES):
                if value.start + at in host.maps:
                    maps[PARAMETERS + offset + at] = host.maps[value.start + at]
        else:
            parameters[offset : offset + 8] = np.frombuffer(np.uint64(value).tobytes(), np.uint8)
    _, *sizes, shared, _ = host.spec
    grid, cluster, block = ((sizes[i], sizes[i + 1], sizes[i + 2]) for i in (0, 3, 6))
    return Launch(
        grid,
        block,
        (max(cluster[0], 1), max(cluster[1], 1), max(cluster[2], 1)),
        shared,
        host.buffers,
        Bytes(parameters, "parameter memory"),
        maps,
    )


@dataclasses.dataclass(frozen=True)
class _Object:
    """Bytes that are passed by value."""

    start: int
    size: int


@dataclasses.dataclass
class _Host:
    """Registers, memory (a value at each address) and what the runtime's functions were called with."""

    buffers: tuple[Bytes, ...]
    registers: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory: dict[int, Any] = dataclasses.field(default_factory=dict)
    maps: dict[int, TensorMap] = dataclasses.field(default_factory=dict)
    spec: list[int] | None = None
    """The function, the sizes of grid, cluster and block, of shared memory, and one more."""
    values: list[int | _Object] = dataclasses.field(default_factory=list)
    """The kernel's parameters."""
    top: int = 1 << 20

    def execute(self, ir: str, name: str) -> None:
        body = re.search(
            rf"^define (?:void|i32) @{re.escape(name)}\(ptr %0, (?:ptr %1, )?ptr (%[12])\)[^{{]*\{{\n(.*?)^\}}",
            ir,
            re.M | re.S,
        )
        if body is None:
            raise PtxError(f"the host module has no function {name}")
        self.registers.update({"%0": _SPEC, "%1": _STREAM, body[1]: _BUFFERS})
        for i in range(len(self.buffers)):
            self.memory[_BUFFERS + 8 * i] = buffer_address(i)
        for line in body[2].splitlines():
            statement = re.sub(r",? *(!dbg.*|align \d+)$", "", line.split(";")[0].strip())
            if statement and not statement.startswith("ret "):
                try:
                    self.step(statement)
                except (KeyError, TypeError, ValueError) as error:
                    raise PtxError(f"cannot execute {statement!r} of the host function: {error!r}") from error

    def value(self, text: str) -> Any:
        text = text.strip().split(" ")[-1]
        if text.startswith("%"):
            return self.registers[text]
        if text in ("undef", "poison", "null"):
            return {} if text != "null" else 0
        return int(text)

    def step(self, statement: str) -> None:
        target, _, operation = (
            statement.rpartition(" = ") if not statement.startswith(("store", "call")) else ("", "", statement)
        )
        word, _, rest = operation.partition(" ")
        if word == "store":
            value, pointer = _split(rest)
            self.memory[self.value(pointer)] = self.value(value)
        elif word == "call":
            function, arguments = re.match(r"(?:void|i32) @(\w+)\((.*)\)$", rest).groups()  # pyright: ignore
            self.call(function, [self.value(a) for a in _split(arguments)])
        else:
            self.registers[target] = getattr(self, f"do_{word}")(rest)

    def do_load(self, rest: str) -> Any:
        kind, pointer = _split(rest)
        at = self.value(pointer)
        return _Object(at, _size(kind)) if kind.startswith("[") else self.memory[at]

    def do_alloca(self, rest: str) -> int:
        kind, *count = _split(rest)
        self.top = -(-self.top // 64) * 64
        start = self.top
        self.top += _size(kind) * (self.value(count[0]) if count else 1)
        return start

    def do_getelementptr(self, rest: str) -> int:
        kind, pointer, *indices = _split(re.sub(r"^(?:inbounds |nuw |nusw )+", "", rest))
        at = self.value(pointer) + self.value(indices[0]) * _size(kind)
        for index in indices[1:]:
            fields = _split(kind.strip()[1:-1])
            at += sum(_size(f) for f in fields[: self.value(index)])
        return at

    def do_insertvalue(self, rest: str) -> dict[tuple[int, ...], Any]:
        aggregate, value, *path = _split(rest)
        return {**self.value(aggregate), tuple(map(int, path)): self.value(value)}

    def do_extractvalue(self, rest: str) -> Any:
        aggregate, *path = _split(rest)
        found, key = self.value(aggregate), tuple(map(int, path))
        if key in found:
            return found[key]
        return {k[len(key) :]: v for k, v in found.items() if k[: len(key)] == key}

    def do_mul(self, rest: str) -> int:
        a, b = _split(rest)
        return self.value(a) * self.value(b)

    def do_add(self, rest: str) -> int:
        a, b = _split(rest)
        return self.value(a) + self.value(b)

    def do_ptrtoint(self, rest: str) -> int:
        return self.value(rest.rpartition(" to ")[0])

    do_inttoptr = do_sext = do_zext = do_ptrtoint

    def call(self, function: str, arguments: list[Any]) -> None:
        if function == "mosaic_gpu_build_kernel_spec":
            *self.spec, count, values, sizes = arguments
            for number in range(count):
                at, size = self.memory[values + 8 * number], self.memory[sizes + 4 * number]
                self.values.append(_Object(at, size) if size else self.memory[at])
        elif function == "mosaic_gpu_launch_kernel":
            *self.spec, _, values = arguments
            while values in self.memory:
                self.values.append(self.memory[self.memory[values]])
                values += 8
        elif function == "mosaic_gpu_init_tma_desc":
            at, base, element, rank, sizes, strides, swizzle, box = arguments
            itemsize = _ELEMENT_BYTES[element]
            buffer = self.buffers[(base >> 40) - 1]
            size, stride, extent = (tuple(self.memory[p + 8 * i] for i in range(rank)) for p in (sizes, strides, box))
            offset = base - buffer_address((base >> 40) - 1)
            self.maps[at] = TensorMap(
                buffer, offset, itemsize, size, tuple(s * itemsize for s in stride), extent, max(swizzle, 16)
            )
        else:
            raise ValueError(f"the runtime's function {function} is not known")


def _size(kind: str) -> int:
    """Bytes of an LLVM type without padding (structures hold pointers and arrays of bytes only)."""
    kind = kind.strip()
    if kind.startswith("{"):
        return sum(_size(k) for k in _split(kind[1:-1]))
    if array := re.match(r"\[(\d+) x (.*)\]$", kind):
        return int(array[1]) * _size(array[2])
    return 8 if kind == "ptr" else int(kind[1:]) // 8


def _split(text: str) -> list[str]:
    """Parts between commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]
