"""Text as it comes and goes: encodings, line ends, and files that are whole or not there."""

import errno
import io
import os
from pathlib import Path

import pytest

from kimi_jax.text_files import (
    TextError,
    decode,
    lines_of,
    read_json,
    read_standard_input,
    read_text,
    require_folder,
    require_writable,
    whole_file,
    write_text,
)

SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"
"""What str.splitlines takes for line ends and a JSON or text line may hold."""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r", ["a\r"]),
        (SEPARATORS + "\r\nx", [SEPARATORS, "x"]),
    ],
)
def test_lines_end_at_lf_and_crlf_only(text, lines):
    assert lines_of(text) == lines


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (b"a", "a"),
        (b"a\n", "a"),
        (b"a\r\n", "a"),
        (b"a\n\n", "a\n"),
        (b"a\r\n\r\n", "a\r\n"),
        (b"a\r", "a\r"),
        (b"a\n\r", "a\n\r"),
        (b"  a\t \n", "  a\t "),
        (b"\xef\xbb\xbfa\n", "a"),
        (b"", ""),
    ],
)
def test_standard_input_loses_one_newline_and_nothing_else(given, text):
    assert read_standard_input(io.BytesIO(given)) == text


def test_a_text_is_read_as_it_is_without_its_mark(tmp_path):
    text = "\t x\ufeffy \r\n z\r" + SEPARATORS
    (tmp_path / "a").write_bytes("\ufeff".encode() + text.encode())
    assert read_text(tmp_path / "a") == text
    (tmp_path / "b").write_bytes(b"\xef\xbb\xbf[1, 2]")
    assert read_json(tmp_path / "b") == [1, 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("Zwölf".encode("utf-16"), "F: not UTF-8 text but UTF-16; write it anew with `iconv -f UTF-16 -t UTF-8`"),
        ("Zwölf".encode("utf-32"), "F: not UTF-8 text but UTF-32"),
        ("hello ’".encode("utf-16-le"), "F: not UTF-8 text"),
        ("hello there".encode("utf-16-be"), "F: not UTF-8 text: 11 of 22 bytes are zero, as in UTF-16"),
        ("ok\nZwölf".encode("latin-1"), "F: not UTF-8 text: byte 0xf6 at offset 5, in line 2"),
        (b"\xed\xa0\x80", "F: not UTF-8 text: byte 0xed"),  # a lone surrogate
    ],
)
def test_other_encodings_are_refused_by_name(data, message):
    with pytest.raises(TextError, match=message):
        decode(data, "F")


def stop_within(path):
    with whole_file(path) as stream:
        stream.write(b"half")
        raise RuntimeError


def test_a_file_is_whole_or_as_it_was(tmp_path):
    path = tmp_path / "out"
    write_text(path, "first\r\n")
    with pytest.raises(RuntimeError):
        stop_within(path)
    assert path.read_bytes() == b"first\r\n"
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    write_text(link, "second")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("second", 0o640)
    assert sorted(os.listdir(tmp_path)) == ["link", "out"]


@pytest.mark.parametrize(
    ("place", "code"), [("", errno.EISDIR), ("gone/out", errno.ENOENT), ("file/out", errno.ENOENT)]
)
def test_places_that_take_no_file_are_named_before_the_work(tmp_path, place, code):
    (tmp_path / "file").touch()
    named = (tmp_path / place).parent if place else tmp_path
    with pytest.raises(OSError, match=f"{os.strerror(code)}: '{named}'"):
        require_writable(tmp_path / place)


def test_folders_that_cannot_be_made_are_named(tmp_path):
    (tmp_path / "file").touch()
    require_folder(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(NotADirectoryError, match=f"'{tmp_path / 'file'}'"):
        require_folder(tmp_path / "file" / "b")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_is_named():
    with pytest.raises(OSError, match=f"{os.strerror(errno.ENOSPC)}: '/dev/full'"):
        write_text(Path("/dev/full"), "x")
