"""Machine code of a kernel as SASS: ptxas of the CUDA plugin's wheels, nvdisasm of a wheel of its own."""

import collections
import functools
import re
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path


@functools.cache
def tool(name: str) -> Path:
    """A program of one of the installed NVIDIA wheels.

    Raises:
        FileNotFoundError: no wheel has it.
    """
    for distribution in metadata.distributions():
        if (distribution.name or "").startswith("nvidia-"):
            for file in distribution.files or ():
                if file.name == name and file.parent.name == "bin":
                    return Path(str(distribution.locate_file(file)))
    raise FileNotFoundError(f"no installed wheel has {name}: install nvidia-cuda-nvdisasm and an extra of CUDA")


def assemble(ptx: str, architecture: str) -> bytes:
    """The cubin that ptxas makes of a module.

    Raises:
        RuntimeError: it cannot; the message is its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        _run(tool("ptxas"), f"-arch={architecture}", "-O3", str(source), "-o", str(result))
        return result.read_bytes()


def disassemble(cubin: bytes) -> list[str]:
    """Instructions of a cubin in order, each with its address and labels as lines of their own."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.cubin")
        source.write_bytes(cubin)
        text = _run(tool("nvdisasm"), "-c", str(source))
    return [line.strip() for line in text.splitlines() if re.match(r"\s*(/\*[0-9a-f]+\*/|\.L_\w+:)", line)]


def loops(lines: list[str]) -> list[collections.Counter[str]]:
    """How often each opcode stands in each loop, a loop being what lies between a label and a branch back to it."""
    labels, found, code = {}, [], []
    for line in lines:
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
            continue
        code.append(re.sub(r"^/\*[0-9a-f]+\*/\s*(@!?U?P\w+\s+)?", "", line))
        branch = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if branch and branch[1] in labels:
            body = code[labels[branch[1]] :]
            found.append(collections.Counter(re.split(r"[ .;]", instruction)[0] for instruction in body))
    return found


def hot_loop(cubin: bytes, opcode: str) -> collections.Counter[str]:
    """Opcodes of the innermost loop that has an instruction of this opcode (HMMA, HGMMA, UTCHMMA).

    Raises:
        ValueError: no loop has.
    """
    found = [loop for loop in loops(disassemble(cubin)) if loop[opcode]]
    if not found:
        raise ValueError(f"no loop has {opcode}")
    return min(found, key=lambda loop: loop.total())


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr or done.stdout}")
    return done.stdout
