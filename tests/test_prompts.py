"""Prompt files: what a line may be, and what is said of one that is neither text nor a conversation."""

import json
from pathlib import Path

import pytest

from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.prompts import Prompt, PromptError, Wishes, encode, read_prompts
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
    rows = [json.dumps({"prompt": each}, ensure_ascii=False) for each in (strange, "next")]
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
        ("a.jsonl", b'{"messages": [{}], "tool": []}', r"a\.jsonl:1: a row has no key 'tool'; did you mean 'tools'\?"),
        (
            "a.jsonl",
            b'\n{"prompt": "x", "maxtokens": 5}',
            r"a\.jsonl:2: a row has no key 'maxtokens'; did you mean 'max_",
        ),
        ("a.jsonl", b'{"prompt": "x", "Temperature": 5}', r"no key 'Temperature'; did you mean 'temperature'\?"),
        (
            "a.jsonl",
            b'{"prompt": "x", "response_format": null}',
            r"no key 'response_format'; there are messages, prompt",
        ),
        ("a.jsonl", b'{"prompt": "x", "n": 2}', r"a\.jsonl:1: n is 2; only 1 is possible here"),
        ("a.jsonl", b'{"prompt": "x", "stream": 0}', r"stream is 0; only false is possible here"),
        ("a.jsonl", b'{"prompt": "x", "messages": [{}]}', r"has both messages and prompt; keep one"),
        ("a.jsonl", b'{"prompt": ["x"]}', r"every message is a JSON object"),
        ("a.jsonl", b'{"prompt": 3}', r"expected \{\"messages\": .* or \{\"prompt\""),
        (
            "a.jsonl",
            b'{"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}',
            r"max_tokens and max_completion_tokens say",
        ),
        ("a.jsonl", b'{"prompt": "x", "max_tokens": 0}', r"the tokens to generate are 0; they must be positive"),
        ("a.jsonl", b'{"prompt": "x", "max_tokens": 1.5}', r"max_new_tokens is 1\.5; it must be a whole number"),
        ("a.jsonl", b'{"prompt": "x", "temperature": "hot"}', r"temperature is \"hot\"; it must be a number"),
        ("a.jsonl", b'{"prompt": "x", "temperature": true}', r"temperature is true; it must be a number"),
        ("a.jsonl", b'{"prompt": "x", "temperature": NaN}', r"a\.jsonl:1: NaN is no JSON number"),
        ("a.jsonl", b'{"prompt": "x", "seed": "1"}', r"seed is \"1\"; it must be a whole number"),
        (
            "a.jsonl",
            b'{"prompt": "x", "stop": ["a", ""]}',
            r"stop is \[\"a\", \"\"\]; it is a text or a list of texts, none",
        ),
        ("a.jsonl", b'{"prompt": "x", "id": [1]}', r"id is \[1\]; it is a text or a whole number"),
        ("a.jsonl", b'{"prompt": "x", "prompt": "y"}', r"a\.jsonl:1: the key 'prompt' stands twice in one object"),
        ("a.jsonl", b'{"prompt": "x\\ud800"}', r"a\.jsonl:1: not UTF-8 text: it holds '\\ud800', a lone surrogate"),
        ("a.jsonl", b'["text"]', r"a\.jsonl:1: every message is a JSON object with role and content"),
        ("a.jsonl", b'{"messages": [{}], "tools": 5}', r"a\.jsonl:1: tools is a list of JSON objects"),
        ("a.jsonl", b'{"messages": [{}], "tools": ["add"]}', r"a\.jsonl:1: tools is a list of JSON objects"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


def test_a_row_says_how_its_answer_is_drawn(tmp_path):
    rows = [
        {
            "id": "a",
            "prompt": "x",
            "max_tokens": 5,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "seed": -1,
        },
        {"custom_id": 7, "messages": [{"role": "user", "content": "x"}], "stop": "END", "max_completion_tokens": 9},
        {"prompt": "x", "id": None, "stop": ["a", "b"], "n": 1, "stream": False, "tool_choice": "auto", "seed": None},
        {"prompt": [{"role": "user", "content": "x"}], "max_new_tokens": 2, "max_tokens": 2},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second, third, fourth = read_prompts(tmp_path / "a.jsonl")
    assert (first.id, first.plain, first.text) == ("a", True, "x")
    assert first.wishes == Wishes(5, 0, 0.5, 3, 0.1, -1)
    assert (second.id, second.plain, second.wishes) == (7, False, Wishes(9, stop=("END",)))
    assert (third.id, third.wishes) == (None, Wishes(stop=("a", "b")))
    assert (fourth.plain, fourth.text, fourth.wishes) == (False, "x", Wishes(2))


def test_errors_of_a_conversation_name_its_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"messages": [{"role": "bot", "content": "x"}]}')
    tokenizer = Tokenizer.from_directory(BUNDLED_CHECKPOINT)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: messages\[0\] has role 'bot'"):
        encode(read_prompts(tmp_path / "a.jsonl"), tokenizer, raw=False, thinking=False, system=None)
    with pytest.raises(ValueError, match=r"prompt 2: not UTF-8 text: it holds '\\udcff'"):
        encode([Prompt.of("x"), Prompt.of("x\udcff")], tokenizer, raw=False, thinking=False, system=None)
    with pytest.raises(ValueError, match="prompt 1: is empty, and raw text needs something to continue"):
        encode([Prompt.of("")], tokenizer, raw=True, thinking=False, system=None)


@pytest.mark.parametrize(
    ("prompt", "system"),
    [
        (Prompt.of("x"), "Be brief."),
        (Prompt(({"role": "user", "content": "x"},), (TOOL,), plain=True), None),
        (Prompt(({"role": "user", "content": "x"},)), None),
        (Prompt(({"role": "user", "content": [{"type": "text", "text": "x"}]},)), None),
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
