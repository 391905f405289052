"""decode as a user runs it: once in a process of its own, else in this one."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANDOM = ("--checkpoint", "tests/data/tiny_random", "--drafter", "tests/data/tiny_random_drafter")
STORY = "Tell a story about a fox named Mila, a forest and a coin."


@pytest.fixture
def decode(command):
    return functools.partial(command, "decode")


def test_json_output_and_nothing_else():
    """Also that decode.py starts from nothing, where the environment speaks neither of JAX nor of XLA."""
    arguments = ("Hello", "Sort 3 1 2", "--max-new-tokens", "6", "--budget", "4", "--json", *RANDOM)
    result = subprocess.run(
        [sys.executable, "scripts/decode.py", *arguments], cwd=ROOT, capture_output=True, text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    output = json.loads(result.stdout)
    assert result.stderr == "", "with the plugin installed and no GPU, nothing noisy is printed"
    assert [entry["prompt"] for entry in output["results"]] == ["Hello", "Sort 3 1 2"]
    for entry in output["results"]:
        assert len(entry["token_ids"]) == 6
        assert entry["finish_reason"] == "length"
        assert entry["thinking"]
    summary = output["summary"]
    assert summary["tokens"] == 12
    assert summary["speculation"] == "ddtree"
    assert summary["acceptance_length"] >= 1
    assert "local" in summary["ran"]


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [("hgx-ib-8", "dp 1 × ep 1 × tp 8, simulated on 8 CPU devices"),
     pytest.param("nvl72", "dp 1 × ep 9 × tp 8, simulated on 72 CPU devices", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_readmes_command_tells_a_story_and_plain_decoding_the_same(decode, mesh, layout):
    drafted = decode("--mesh", mesh, STORY)
    assert drafted.out.startswith("Once there was a fox named Mila. Mila lived near a forest.")
    lines = drafted.err.splitlines()
    assert lines[0] == f"{mesh}: {layout}"
    assert re.fullmatch(
        r"32 tokens in [\d.]+ s: [\d.]+ s to start, then [\d.]+ tokens/s, [\d.]+ tokens a round", lines[1]
    ), "one plain line, which ends what is printed"
    assert len(lines) == 2
    plain = decode(STORY, "--speculation", "none", "-v")
    assert plain.out == drafted.out
    assert re.search(r"^31 rounds; experts ", plain.err, re.MULTILINE)
    last = plain.err.splitlines()[-1]
    assert re.fullmatch(r"32 tokens in [\d.]+ s: [\d.]+ s to start, then [\d.]+ tokens/s", last)


def test_lines_come_as_prompts_end_and_a_journal_remembers_them(decode, tmp_path):
    prompts, journal = tmp_path / "prompts.jsonl", tmp_path / "journal.jsonl"
    rows = [
        {"prompt": f"Line {number}", "max_tokens": limit, "id": str(number)} for number, limit in enumerate((9, 2, 4))
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--file", prompts, *RANDOM[:2], "--speculation", "none", "--raw", "--batch", "3")

    def lines(*more):
        return [json.loads(line) for line in decode(*options, *more).out.splitlines()]

    *done, last = lines("--lines", "done", "--journal", journal)
    assert [line["index"] for line in done] == [1, 2, 0]
    assert last["summary"]["from_journal"] == 0
    assert [len(line["token_ids"]) for line in done] == [2, 4, 9]
    *order, _ = lines("--lines", "order")
    assert [line["index"] for line in order] == [0, 1, 2]
    assert sorted(done, key=lambda line: line["index"]) == order
    whole = journal.read_text()
    kept = whole.splitlines(keepends=True)
    journal.write_text(kept[0] + kept[1][:40])  # killed while it wrote
    *again, last = lines("--lines", "order", "--journal", journal)
    assert again == order
    assert last["summary"]["from_journal"] == 1
    assert journal.read_text().splitlines(keepends=True)[0] == kept[0]
    *again, last = lines("--lines", "order", "--journal", journal)
    assert again == order
    assert last["summary"] == {"prompts": 3, "from_journal": 3}
    journal.write_text("one line of prompts without an end")
    assert "is no journal" in decode(*options, "--journal", journal, expect=1).err
    assert journal.read_text() == "one line of prompts without an end"
    journal.write_text("no journal\n")
    assert "is no line of a journal" in decode(*options, "--journal", journal, expect=1).err


@pytest.mark.slow
def test_prompts_from_files_and_standard_input(decode, tmp_path):
    lines, messages = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("First line\n\nSecond line\n")
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "A"},
    ]
    messages.write_text(json.dumps({"messages": chat}) + "\n")
    options = (*RANDOM[:2], "--max-new-tokens", "1", "--json", "--speculation", "none")
    from_lines = json.loads(decode("--file", str(lines), *options).out)
    assert [entry["prompt"] for entry in from_lines["results"]] == ["First line", "Second line"]
    from_chat = json.loads(decode("--file", str(messages), *options).out)["results"][0]
    assert from_chat["prompt"] == "A"
    piped = json.loads(decode(*options, stdin="First line").out)["results"][0]
    assert piped["token_ids"] == from_lines["results"][0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "--mesh", "hgx-ib-36"), "four and a half|4.5 nodes"),
        (("x", "--mesh", "nvl99"), "nvl72"),
        (("x", "--checkpoint", "missing"), "missing/config.json"),
        (("x", "--mesh", "nvl72", "--tp", "3"), "tp"),
        (("x", "--temperature", "-1"), "temperature"),
        (("x", "--budget", "-3"), "budget"),
        (("x", "--file", "missing.txt"), "missing.txt"),
        (("x", "--checkpoint", "tests/data/variant_ct", "--speculation", "chain"), "--drafter"),
        (("x", "--save-placement", "p.json"), "--save-placement keeps what --rebalance-every finds: give that too"),
        ((), "no prompt: give one as an argument, with --file, or on standard input"),
        (("x", "--checkpoint", "tests/data/variant_ct", "--drafter", "tests/data/tiny_random_drafter"),
         "num_target_layers"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_it(decode, arguments, message):
    ended = decode(*arguments, expect=1)
    assert re.search(message, ended.err), ended.err
    assert ended.out == ""
