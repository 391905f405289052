"""Text as users give it and as the project keeps it: UTF-8, lines that end at LF or CRLF, files that are whole.

A byte order mark is no part of a text. Everything else is: no newline is translated, no character dropped.
"""

import codecs
import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before UTF-16, whose mark it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_MOST_ZEROS = 0.2
"""Share of zero bytes beyond which a file is no UTF-8 text: UTF-16 has a zero beside every ASCII character."""


class TextError(ValueError):
    """Bytes that are not UTF-8 text; the message names the file and the place."""


def decode(data: bytes, name: str | Path) -> str:
    """UTF-8 text without its byte order mark.

    Raises:
      TextError: another encoding, naming `name` and where it shows.
    """
    for mark, encoding in _OTHER_MARKS.items():
        if data.startswith(mark):
            raise TextError(f"{name}: not UTF-8 text but {encoding}; write it anew with `iconv -f {encoding} -t UTF-8`")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextError(
            f"{name}: not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}, in line {line} "
            f"({error.reason})"
        ) from None
    if data.count(0) > _MOST_ZEROS * len(data):
        raise TextError(f"{name}: not UTF-8 text: {data.count(0)} of {len(data)} bytes are zero, as in UTF-16")
    return text.removeprefix("\ufeff")


def require_utf8(text: str, name: str) -> str:
    """The text.

    Raises:
      TextError: where it holds a lone surrogate, as an argument that is not UTF-8 does.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"{name}: not UTF-8 text: it holds {text[error.start]!a}, a lone surrogate, behind "
            f"{text[max(0, error.start - 20) : error.start]!a}"
        ) from None
    return text


def read_text(path: str | Path) -> str:
    """A file's text.

    Raises:
      TextError: and OSError naming the file.
    """
    return decode(Path(path).read_bytes(), path)


def read_json(path: str | Path) -> Any:
    """A JSON file's value.

    Raises:
      TextError: where it is none, and OSError, naming the file.
    """
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TextError(f"{path}: not JSON ({error})") from None


def read_standard_input(stream: BinaryIO) -> str:
    """What a program or a terminal gave, without the one newline that `echo` and editors end a text with.

    Raises:
      TextError: it is not UTF-8.
    """
    text = decode(stream.read(), "standard input")
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def lines_of(text: str) -> list[str]:
    """Lines, which end at LF or CRLF and nowhere else; the last one need not end."""
    *ended, rest = text.split("\n")
    return [line.removesuffix("\r") for line in ended] + ([rest] if rest else [])


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Gives an OSError that names no file, as writing to a full disk raises, this one's name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def require_writable(path: Path) -> None:
    """Refuses an output file that could not be written, before the work whose result it is to hold.

    Raises:
      OSError: naming `path`, or the folder that is missing or does not take a file.
    """
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    _require_access(path if path.exists() else folder, path)


def _require_access(place: Path, named: Path) -> None:
    if not os.access(place, os.W_OK):
        code = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(named))


def require_folder(path: Path) -> None:
    """Refuses an output folder that is not there and could not be created, or takes no files.

    Raises:
      OSError: naming `path`, or the part of it that stands in the way.
    """
    there = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    _require_access(there, there)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary stream whose bytes become the file `path` when all of them are on disk, and nothing before.

    What stood there stays until then. A device or pipe is written as it is.

    Raises:
      OSError: naming `path`.
    """
    require_writable(path)
    if path.exists() and not path.is_file():
        with naming(path), path.open("wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))  # a link stays one
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.incomplete")
    try:
        with naming(path), partial.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except OSError as error:
        if error.filename == str(partial):
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file that is whole or not there.

    Raises:
      OSError: naming it.
    """
    with whole_file(path) as stream:
        stream.write(text.encode("utf-8"))
