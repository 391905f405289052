"""What scripts import before they know that they are going to run: help and refusals must not wait for jax."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

READ_AND_REFUSE = """
import importlib, sys
from pathlib import Path
from kimi_jax.commands import COMMANDS

for name in COMMANDS:
    importlib.import_module(f"kimi_jax.commands.{name}")
assert {script.stem for script in Path("scripts").glob("*.py")} == COMMANDS.keys()

from kimi_jax.opening import check_configurations
from meshes.presets import Layout

for folders in (Path("gone"),), (Path("kimi_jax/assets/small"), Path("gone")):
    try:
        check_configurations(folders[0], Layout(), *folders[1:])
    except ValueError as error:
        print(error)
print("jax" in sys.modules)
"""


def test_help_and_refused_folders_do_not_import_jax():
    command = [sys.executable, "-c", READ_AND_REFUSE]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    target, drafter, imported = run.stdout.splitlines()
    assert target == "gone/config.json: no such file; a checkpoint directory holds a config.json"
    assert drafter == "gone/config.json: no such file; a drafter's folder holds a config.json"
    assert imported == "False"


def test_the_engine_does_not_import_kernels_that_no_cpu_runs():
    source = "import sys, kimi_jax.decoding.engine; print('jax.experimental.mosaic.gpu' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
