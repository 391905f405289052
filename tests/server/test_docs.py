"""What docs/serving.md says to a server is said to one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.scripted import scripted

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
CURLS = re.findall(r"^curl .*?'(?=\n)", "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S)), re.M | re.S)
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def server(tokenizer):
    with scripted(tokenizer, lambda request: tokenizer.encode("Fine.<|im_end|>", allow_special=True)) as running:
        yield running


@pytest.mark.parametrize("command", CURLS)
def test_curl_is_answered(server, command):
    command = command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    if "stream" in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
        assert '"usage"' in done.stdout
    else:
        assert "error" not in json.loads(done.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs(server, program):
    program = program.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Fine." in done.stdout


def test_all_were_found():
    assert len(CURLS) == 3
    assert len(PROGRAMS) == 1
