"""What NVIDIA's assembler says of the Pallas kernels of a compile: registers, stack and spills; and shared memory.

Mosaic prints the assembler's report through C's standard output when an environment variable asks for it; there is no
other way to it. The variable is set and the output caught for the duration of one compile. Shared memory is asked for
at launch, not assembled: it stands in the kernel's MLIR, which the compiled program carries.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mosaic.python import mosaic_gpu

PTXAS, PTX = "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_PTX"
"""Variables that make Mosaic print the assembler's report, and the PTX that it is given."""
_MODULE = re.compile(r'module = "((?:[^"\\]|\\.)*)"')
_REPORT = re.compile(
    r"Compiling entry function '([^']*)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Assembled:
    """One kernel as the assembler left it, a thread's registers and bytes."""

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int | None = None
    """Shared memory of a block in bytes, asked for at launch; None where the program does not say."""


def read(text: str) -> tuple[Assembled, ...]:
    """Distinct kernels of the assembler's output, by name."""
    found = {Assembled(name, int(used), *map(int, rest)) for name, *rest, used in _REPORT.findall(text)}
    return tuple(sorted(found, key=lambda kernel: (kernel.name, kernel.registers)))


def with_shared_memory(kernels: tuple[Assembled, ...], program: str) -> tuple[Assembled, ...]:
    """The kernels with the shared memory that a compiled program's text asks for, by their names."""
    found = shared_memory(program)
    named = {kernel: [name for name in found if kernel.name.startswith(name)] for kernel in kernels}
    return tuple(
        dataclasses.replace(kernel, shared_bytes=found[max(names, key=len)] if names else None)
        for kernel, names in named.items()
    )


def shared_memory(program: str) -> dict[str, int]:
    """Bytes of shared memory of a block, by the function that launches the kernel; the most where several do.

    Reads Mosaic's MLIR bytecode from the custom calls of a compiled program's text: the last operand of a launch.
    """
    found: dict[str, int] = {}
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    mosaic_gpu.register_dialect(context)
    with context:
        for text in dict.fromkeys(_MODULE.findall(program)):
            launched: list[int] = []

            def visit(operation: Any, launched: list[int] = launched) -> Any:
                if operation.name.endswith("gpu.launch"):
                    size = operation.operands[len(operation.operands) - 1].owner
                    launched.append(size.attributes["value"].value)
                elif operation.name.endswith("func.func") and launched:  # after what stands in it
                    name = operation.attributes["sym_name"].value
                    found[name] = max(found.get(name, 0), *launched)
                    launched.clear()
                return ir.WalkResult.ADVANCE

            ir.Module.parse(_unescaped(text)).operation.walk(visit)
    return found


def _unescaped(text: str) -> bytes:
    """The bytes that HLO prints as a string: two hexadecimal digits or one character behind a backslash."""
    letters = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}

    def byte(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 16)]) if len(match[1]) == 2 else letters.get(match[1], match[1])

    return re.sub(rb"\\([0-9A-Fa-f]{2}|.)", byte, text.encode(), flags=re.DOTALL)


@contextlib.contextmanager
def caught_output(wanted: bool, variables: Sequence[str] = (PTXAS,)) -> Iterator[list[str]]:
    """Catches what C code prints, the assembler's reports among it; the list holds the text afterwards."""
    caught: list[str] = []
    if not wanted:
        yield caught
        return
    before, saved = {name: os.environ.get(name) for name in variables}, os.dup(1)
    flush = ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile() as file:
        flush(None)
        os.environ.update(dict.fromkeys(variables, "1"))
        os.dup2(file.fileno(), 1)
        try:
            yield caught
        finally:
            flush(None)
            os.dup2(saved, 1)
            os.close(saved)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
            file.seek(0)
            caught.append(file.read().decode(errors="replace"))
