"""Golden figures of the compiled rounds that the tests look at: everything that this project's code decides.

    uv run tests/profiling/golden.py

writes them anew. What XLA decides (temporaries, how much moves between kernels) is left out: it changes with jax.
"""

import json
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kimi_jax.profiling.compile import Compiled
from kimi_jax.profiling.diff import figures
from kimi_jax.profiling.report import make_report

DIRECTORY = Path(__file__).parent / "golden"
OF_XLA = (
    "temporaries",
    "total",
    "free",
    "xla_peak",
    "most_requests",
    "most_context",
    "moved bytes",
    "copy of",
    "launches",
    "modelled",
)


def golden(compiled: Compiled) -> dict[str, Any]:
    """Figures by name, as JSON gives them back."""
    found = figures(json.loads(json.dumps(make_report(compiled).as_dict())))
    return {name: value for name, value in found if not any(word in name for word in OF_XLA)}


def path(compiled: Compiled) -> Path:
    """Where a preset's figures stand."""
    return DIRECTORY / f"{compiled.case.preset.name}-{compiled.case.gpu}.json"


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    script = Path(__file__).with_name("compiled.py")
    # One process compiles for one architecture: Mosaic keeps the first.
    for mesh, gpu in (("hgx-ib-16", "h200"), ("nvl72", "gb300")):
        with tempfile.NamedTemporaryFile() as file:
            command = [sys.executable, str(script), mesh, gpu, "round", "6", "2", "reduced", file.name]
            subprocess.run(command, check=True)
            program = pickle.load(file)
        path(program).write_text(json.dumps(golden(program), indent=1, ensure_ascii=False) + "\n")
        print(path(program))
