"""Tables at several widths: what is shown, and that no word is broken or lost."""

import pytest
from rich.console import Console

from kimi_jax.tables import PIPE_WIDTH, bars, command_line, left, right, show, table, table_console

COLUMNS = (*left("layer"), *right("bytes"), *left("why", wide=True))
ROWS = [("attention", "12", "latents are read once"), None, ("[red]experts", "3,456", "whole experts lie on ranks")]


def lines(renderable, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(renderable, crop=False)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_narrow_and_wide():
    narrow = lines(table("two", COLUMNS, ROWS), 80)
    assert narrow[0] == "two"
    assert narrow[1] == "layer         bytes"
    assert narrow[3] == "attention        12"
    assert narrow[-1] == "[red]experts  3,456"  # text, not markup
    assert any(line.endswith("latents are read once") for line in lines(table("", COLUMNS, ROWS, wide=True), 80))


@pytest.mark.parametrize("width", [12, 30, 41, 80])
def test_words_stay_whole_at_every_width(width):
    shown = " ".join(lines(table("", COLUMNS, ROWS, wide=True), width)).split()
    for word in ("attention", "[red]experts", "3,456", "latents", "once", "whole", "experts", "ranks"):
        assert word in shown
    assert "…" not in "".join(shown)


def test_a_pipe_is_not_cut(capsys):
    assert table_console().width == PIPE_WIDTH
    command = "uv run scripts/decode.py " + "--option value " * 20
    show(command_line(command), table("", COLUMNS, [("a", "1", "w " * 200)], wide=True))
    out = capsys.readouterr().out.splitlines()
    assert out[0].rstrip() == command.rstrip()
    assert out[-1].count("w") == 200


def test_a_command_has_no_line_break_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("kimi_jax.tables.table_console", lambda: Console(width=20))
    show(command_line("uv run scripts/decode.py --mesh nvl72 --ep 9"))
    assert capsys.readouterr().out == "uv run scripts/decode.py --mesh nvl72 --ep 9\n"


def test_bars_share_a_scale():
    shown = lines(bars("bytes", "MB", {"must": {"a": 1.0, "b": 0.0}, "moved": {"a": 2.0, "b": 4.0}}, width=8), 80)
    assert [line.count("█") for line in shown[3:]] == [2, 4, 0, 8]
