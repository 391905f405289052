"""Where output cannot go, and files that cannot be read or written: one line, or nothing at a closed pipe."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_jax.commands import COMMANDS
from kimi_jax.commands.errors import message_of

ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow


def run(command, *arguments, stdout=subprocess.PIPE):
    result = subprocess.run(
        [sys.executable, f"scripts/{command}.py", *map(str, arguments)], cwd=ROOT, stdout=stdout,
        stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in result.stderr
    return result


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("command", [c if c == "decode" else pytest.param(c, marks=slow) for c in COMMANDS])
def test_help_into_a_closed_pipe_ends_quietly(command):
    result = run(command, "--help", stdout=closed_pipe())
    assert (result.returncode, result.stderr) == (141, "")


@slow
@pytest.mark.parametrize(
    "arguments",
    [("estimate", "point", "--json"), ("estimate", "recommend"), ("doctor", "--json")],
)  # fmt: skip
def test_results_into_a_closed_pipe_end_quietly(arguments):
    result = run(*arguments, stdout=closed_pipe())
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [pytest.param(("train", "--help"), marks=slow), ("estimate", "point", "--json")])
def test_output_that_is_lost_is_an_error(arguments):
    with open("/dev/full", "w") as full:
        result = run(*arguments, stdout=full)
    assert result.returncode == 1
    assert (
        result.stderr == "error: standard output: no space is left on the device; free some or choose another place\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--file", "tests"), "tests: this is a folder; name a file"),
        (("decode", "--file", "a\x1b[2J:smile:"), "a\x1b[2J:smile:: there is no such file or folder"),
        (("estimate", "plot", "budget", "--output", "gone/x.png"), "gone: there is no such file or folder"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_named_in_one_line(command, arguments, message):
    error = command(*arguments, expect=1).err
    assert error.replace(f"{ROOT}/", "").startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_errors_of_the_system_say_the_file_and_what_to_do():
    assert message_of(PermissionError(errno.EACCES, "x", "a b")) == (
        "a b: permission denied; change its permissions or choose another place"
    )
    assert message_of(OSError(errno.EIO, os.strerror(errno.EIO), b"a")) == "a: Input/output error"
    assert message_of(FileNotFoundError("said by the project")) == "said by the project"
    assert message_of(ValueError("x")) == "x"
