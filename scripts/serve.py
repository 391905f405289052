"""`kimi-jax serve`, run from a checkout."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose names hide others' modules

from kimi_jax.commands import run

run("serve", sys.argv[1:])
