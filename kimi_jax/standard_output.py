"""Standard output: failures that name it, a reader that has gone away, and characters that a terminal would obey."""

import io
import os
import re
import sys
from typing import Any, TextIO

from rich.console import Console

NAME = "standard output"
CLOSED_PIPE_STATUS = 141
"""Exit status of a command whose reader has gone away: what a shell gives for SIGPIPE."""

_CONTROL = re.compile(r"\r\n|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal acts on, but for tabs and line ends."""


class _Descriptor(io.FileIO):
    """A file descriptor whose write errors say that it is standard output."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, NAME) from None


def text_stream(descriptor: int, *, line_buffering: bool = False) -> TextIO:
    """A stream onto standard output: UTF-8 into pipes and files, in the terminal's encoding on a terminal.

    Its write errors carry the file name `NAME`.
    """
    raw = _Descriptor(descriptor, "w", closefd=False)
    terminal = raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(sys.__stdout__, "encoding", "utf-8") if terminal else "utf-8",
        errors="replace" if terminal else "surrogateescape",
        newline="\n",
        line_buffering=terminal or line_buffering,
    )


def own() -> None:
    """Makes `sys.stdout` such a stream, where Python's own is in place."""
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout.flush()
        sys.stdout = text_stream(sys.stdout.fileno())


def abandon() -> None:
    """Lets what is left of the output go nowhere, so that the end of the program does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class OutputConsole(Console):
    """rich's console on standard output; a reader that has gone away is no business of rich's."""

    def on_broken_pipe(self) -> None:
        """Leaves the BrokenPipeError that is being handled to the caller."""
        raise


def harmless(text: str) -> str:
    """The text with control characters in sight instead of in effect: ESC as ␛, U+009B as \\x9b; tabs stay tabs."""

    def picture(match: re.Match[str]) -> str:
        control = match[0]
        if control == "\r\n":
            return control
        code = ord(control)
        return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"\\x{code:02x}"

    return _CONTROL.sub(picture, text)
