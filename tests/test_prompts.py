"""Prompt files: what a line may be, and what is said of one that is neither text nor a conversation."""

import json
from pathlib import Path

import pytest

from kimi_jax.cli import BUNDLED_CHECKPOINT
from kimi_jax.prompts import Prompt, PromptError, encode, read_prompts
from kimi_jax.tokenizer import Tokenizer, write_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_lines_of_text_and_of_conversations(tmp_path):
    text, chats = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("One\n\n  \nZwölf\n", encoding="utf-8")
    assert read_prompts(text) == [Prompt.of("One"), Prompt.of("Zwölf")]
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "A"}]
    chats.write_text(f"{json.dumps(messages)}\n\n{json.dumps({'messages': messages, 'tools': [TOOL]})}\n")
    alone, with_tools = read_prompts(chats)
    assert (alone.text, alone.messages, alone.tools) == ("A", tuple(messages), ())
    assert with_tools.tools == (TOOL,)


def test_lines_end_at_lf_or_crlf_alone_and_a_mark_is_no_text(tmp_path):
    text, chats = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    strange = "Add\u2028612\x85and\x0b259\x0c.\u2029"
    text.write_bytes(f"\ufeff{strange}\r\nnext\n".encode())
    assert read_prompts(text) == [Prompt.of(strange), Prompt.of("next")]
    rows = [json.dumps({"messages": Prompt.of(each).messages}, ensure_ascii=False) for each in (strange, "next")]
    chats.write_bytes(("\ufeff" + "\r\n".join(rows)).encode())
    assert read_prompts(chats) == [Prompt.of(strange), Prompt.of("next")]


@pytest.mark.parametrize(
    ("content", "label"),
    [
        ("", "(empty)"),
        (" \n\t", "(empty)"),
        ("\n a\u2028b \nc", "a\u2028b"),
        ([{"type": "text", "text": "a"}] * 2, "aa"),
        (None, "(empty)"),
    ],
)
def test_every_prompt_has_a_label(content, label):
    assert Prompt(({"role": "tool", "content": content},)).label == label


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n", r"a\.txt: there is no prompt in it"),
        ("a.txt", b"\xff\xfe", r"a\.txt: not UTF-8 text"),
        ("a.jsonl", b'[{"role": "user"}]\n{', r"a\.jsonl:2: not JSON .*; a \.jsonl file has one conversation a line"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not JSON"),
        ("a.jsonl", b"[]", r"a\.jsonl:1: expected \{\"messages\": .* with at least one message"),
        ("a.jsonl", b'"text"', r"a\.jsonl:1: expected \{\"messages\""),
        ("a.jsonl", b'["text"]', r"a\.jsonl:1: every message is a JSON object with role and content"),
        ("a.jsonl", b'{"messages": [{}], "tools": 5}', r"a\.jsonl:1: tools is a list of JSON objects"),
        ("a.jsonl", b'{"messages": [{}], "tools": ["add"]}', r"a\.jsonl:1: tools is a list of JSON objects"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("prompt", "system"),
    [
        (Prompt.of("x"), "Be brief."),
        (Prompt(({"role": "user", "content": "x"},), (TOOL,)), None),
        (Prompt(({"role": "user", "content": "x"},) * 2), None),
    ],
)
def test_raw_text_takes_no_template(prompt, system):
    tokenizer = Tokenizer.from_directory(BUNDLED_CHECKPOINT)
    with pytest.raises(PromptError, match="raw prompts are plain text: leave out the system message, tools and"):
        encode([prompt], tokenizer, raw=True, thinking=False, system=system)
    assert encode([Prompt.of("x")], tokenizer, raw=True, thinking=False, system=None) == [tokenizer.encode("x")]


@pytest.mark.parametrize("name", ["history keeps thinking", "answer after a call, kept"])
def test_thinking_is_preserved_in_prompts_as_in_the_reference_template(name, tmp_path):
    """What K2.7-Code expects: every answer begins with thinking, and earlier turns keep theirs."""
    golden = json.loads((Path(__file__).parent / "data" / "chat_golden.json").read_text(encoding="utf-8"))
    write_tokenizer(tmp_path, [bytes.fromhex(token) for token in golden["tokens"]])
    tokenizer = Tokenizer.from_directory(tmp_path)
    (case,) = [case for case in golden["chats"] if case["name"] == name]
    prompt = Prompt(tuple(case["messages"]), ())
    options = {"raw": False, "thinking": True, "system": None}
    assert encode([prompt], tokenizer, **options, preserve_thinking=True) == [case["ids"]]
    assert encode([prompt], tokenizer, **options) != [case["ids"]]
    assert case["text"].endswith("<think>")
