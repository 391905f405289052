"""Compiles exported programs for absent cards, and gives the PTX and the host's code of their kernel.

A process assembles for the first architecture that it meets, so each card has one of its own: this file is its program
too. It reads exported programs from standard input and answers with what Mosaic dumped.
"""

import atexit
import functools
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]


class Compiler:
    """A process that compiles for one card."""

    def __init__(self, card: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "PYTHONPATH": str(ROOT),
            # Mosaic reads where to dump from the environment; there is no other way to tell it.
            "MOSAIC_GPU_DUMP_TO": self._folder.name,
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_HOST_LLVM": "1",
        }
        command = [sys.executable, __file__, card, self._folder.name]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        atexit.register(self._process.kill)

    def compile(self, program: bytes) -> tuple[str, str]:
        """The PTX and the host's LLVM IR of the one kernel of an exported program.

        Raises:
            RuntimeError: it cannot be compiled, or has no kernel or several; the message is the compiler's.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _send(self._process.stdin, program)
            answer = _receive(self._process.stdout)
        except (EOFError, BrokenPipeError):
            self._errors.seek(0)
            raise RuntimeError(f"the compiler ended:\n{self._errors.read().decode(errors='replace')[-3000:]}") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


@functools.cache
def of(card: str) -> Compiler:
    """The compiler for a card, started when it is first asked for."""
    return Compiler(card)


def _send(pipe: IO[bytes], what: Any) -> None:
    pickle.dump(what, pipe)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    return pickle.load(pipe)


def _serve(card: str, folder: Path) -> None:
    import jax
    import jax.export
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshes.targets import target

    # What the compiler prints must not get into the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name=card, topology="1x1x1", target_config=target(card)
    ).devices
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
    while True:
        try:
            program = _receive(sys.stdin.buffer)
        except EOFError:
            return
        for file in folder.iterdir():
            file.unlink()
        try:
            exported = jax.export.deserialize(bytearray(program))
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in exported.in_avals]
            jax.jit(exported.call).lower(*shapes).compile()
        except Exception as error:
            _send(answers, f"cannot compile for {card}: {error}")
            continue
        ptx, host = ([f.read_text() for f in sorted(folder.glob(f"*.{end}"))] for end in ("ptx", "ll"))
        if len(ptx) != 1 or len(host) != 1:
            _send(answers, f"the compile left {len(ptx)} PTX and {len(host)} host modules, not one of each")
        else:
            _send(answers, (ptx[0], host[0]))


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
