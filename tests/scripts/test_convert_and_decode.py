"""A converted checkpoint decodes like the one it was made from, on another mesh too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script, *arguments):
    result = subprocess.run(
        [sys.executable, f"scripts/{script}", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_a_sharded_checkpoint_decodes_to_the_same_tokens(tmp_path):
    original, sharded = ROOT / "tests" / "data" / "tiny_random", tmp_path / "sharded"
    run("convert.py", "to-orbax", "--checkpoint", original, "--output", sharded)
    options = ("Hello", "--max-new-tokens", "4", "--speculation", "none", "--json")

    def tokens(*where):
        return json.loads(run("decode.py", *options, *where))["results"][0]["token_ids"]

    expected = tokens("--checkpoint", original)
    assert tokens("--checkpoint", sharded) == expected
    assert tokens("--checkpoint", sharded, "--mesh", "hgx-ib-16") == expected
