"""What every command and subcommand says of its options, at 80 columns."""

import re
from pathlib import Path

import pytest

from kimi_jax.commands import COMMANDS, run

ROOT = Path(__file__).parents[2]
SUBCOMMANDS = {
    "benchmark": ("speculation", "peers", "serve", "scaling", "gpu", "page"),
    "convert": ("plan", "to-orbax", "to-hf"),
    "estimate": ("point", "sweep", "recommend", "smallest", "compare", "explain", "image", "serve", "check", "original",
                 "validate", "plot", "docs"),
    "evaluate": ("logits", "reference", "perplexity", "tasks", "compare"),
    "profile": ("diff",),
    "train": ("target", "drafter", "routing"),
}  # fmt: skip
EVERY = [(name, *subcommand) for name in COMMANDS for subcommand in [(), *((s,) for s in SUBCOMMANDS.get(name, ()))]]


def help_of(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name, *rest = command
    with pytest.raises(SystemExit) as ended:
        run(name, [*rest, "--help"], f"kimi-jax {name}")
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_defaults_are_named_where_they_say_something(command, capsys, monkeypatch):
    text = help_of(command, capsys, monkeypatch)
    flat = re.sub(r"[│\s]+", " ", text)
    for empty in ("(default: None)", "(default: False)", "(default: )", "{None}", "options options", str(ROOT)):
        assert empty not in flat, empty
    assert all(len(line) <= 80 for line in text.splitlines() if line.startswith(("│", " " * 9)))


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_pages_that_are_named_exist(command, capsys, monkeypatch):
    for page in re.findall(r"docs/[\w/]+\.md", help_of(command, capsys, monkeypatch)):
        assert (ROOT / page).exists(), page


def test_every_subcommand_is_among_those_tested(capsys, monkeypatch):
    for name, subcommands in SUBCOMMANDS.items():
        if name != "profile":  # its diff stands beside options of its own
            text = help_of((name,), capsys, monkeypatch)
            assert set(re.findall(r"^[│\s]*• ([a-z-]+) ", text, re.MULTILINE)) == set(subcommands), text
