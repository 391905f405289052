import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compile_apart(tmp_path_factory):
    """Runs compiled.py with the arguments before its output; a failure shows the compiler's own words."""

    def run(*arguments: object):
        output = tmp_path_factory.mktemp("compiled") / "program.pickle"
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("compiled.py"), *map(str, arguments), output],
            env={name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return pickle.loads(output.read_bytes())

    return run
