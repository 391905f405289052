"""Errors told in one line, and nothing lost on the way out."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from rich.console import Console

from kimi_jax import standard_output
from kimi_jax.parallel import processes
from kimi_jax.standard_output import harmless

_ADVICE = {
    errno.ENOENT: "there is no such file or folder; check the name, and create the folder of a file to be written",
    errno.ENOTDIR: "a part of this path is a file, not a folder; check the name",
    errno.EISDIR: "this is a folder; name a file",
    errno.EEXIST: "this exists already; remove it or choose another name",
    errno.ENOTEMPTY: "this folder is not empty; empty it or choose another name",
    errno.EACCES: "permission denied; change its permissions or choose another place",
    errno.EPERM: "this is not permitted; change its permissions or choose another place",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.ENOSPC: "no space is left on the device; free some or choose another place",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another place",
    errno.EFBIG: "the file would exceed the limit of its size (ulimit -f, or the file system's)",
    errno.EMFILE: "too many files are open; raise the limit with ulimit -n",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "the links lead in a circle; check the name",
}


def message_of(error: BaseException) -> str:
    """What to tell of an error: for an operating system's the file, what is wrong with it, and what to do."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    what = _ADVICE.get(error.errno, error.strerror or os.strerror(error.errno))
    if error.filename is None:
        return what
    name = error.filename if isinstance(error.filename, int) else os.fsdecode(error.filename)
    return f"{name}: {what}"


@contextlib.contextmanager
def command() -> Iterator[None]:
    """Around a whole command, its parsing included: errors in one line, and nothing lost on the way out.

    Output is on its way only when it has been flushed: what fails there is an error of the command.
    """
    standard_output.own()
    with errors_in_one_line(Console(stderr=True)):
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()


@contextlib.contextmanager
def errors_in_one_line(console: Console) -> Iterator[None]:
    """Prints an expected error (a wrong file, option or device) without a traceback and exits with status 1.

    Where nobody reads standard output any more, exits with `CLOSED_PIPE_STATUS` and prints nothing. One
    of several processes exits at once after any error, and the others follow.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename == standard_output.NAME:
            standard_output.abandon()
            if isinstance(error, BrokenPipeError):
                processes.end(standard_output.CLOSED_PIPE_STATUS)
        process, of_jax = processes.this(), type(error).__module__.split(".")[0] in ("jax", "jaxlib")
        expected = isinstance(error, ValueError | OSError | RuntimeError) and not of_jax
        if not expected and not isinstance(error, KeyboardInterrupt) and process.count == 1:
            raise
        console.quiet = False
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else f"error: {message_of(error)}"
        if process.count > 1:
            text = f"{process}: {text}"
            if of_jax:
                text += "\nIf this is a failed collective, another process has ended: see its messages first"
            elif not expected:
                console.print_exception()
        with contextlib.suppress(OSError):
            # A name may hold control characters, which a terminal must not obey, and rich would read :names: of emoji.
            text = harmless(text) if console.is_terminal else text
            console.print(text, style="red", highlight=False, markup=False, emoji=False, soft_wrap=True)
        processes.end(130 if isinstance(error, KeyboardInterrupt) else 1)
