"""What NVIDIA's assembler says of the Pallas kernels of a compile: registers, stack and spills.

Mosaic prints the assembler's report through C's standard output when an environment variable asks for it; there is no
other way to it. The variable is set and the output caught for the duration of one compile.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator

_VARIABLE = "MOSAIC_GPU_DUMP_PTXAS"
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


def read(text: str) -> tuple[Assembled, ...]:
    """Distinct kernels of the assembler's output, by name."""
    found = {Assembled(name, int(used), *map(int, rest)) for name, *rest, used in _REPORT.findall(text)}
    return tuple(sorted(found, key=dataclasses.astuple))


@contextlib.contextmanager
def caught_output(wanted: bool) -> Iterator[list[str]]:
    """Catches what C code prints, the assembler's reports among it; the list holds the text afterwards."""
    caught: list[str] = []
    if not wanted:
        yield caught
        return
    before, saved = os.environ.get(_VARIABLE), os.dup(1)
    flush = ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile() as file:
        flush(None)
        os.environ[_VARIABLE] = "1"
        os.dup2(file.fileno(), 1)
        try:
            yield caught
        finally:
            flush(None)
            os.dup2(saved, 1)
            os.close(saved)
            os.environ.pop(_VARIABLE)
            if before is not None:
                os.environ[_VARIABLE] = before
            file.seek(0)
            caught.append(file.read().decode(errors="replace"))
