"""Shown text is the model's text; stop strings end it wherever tokens and dispatches are cut."""

import io
import json
import random

import pytest

from kimi_jax.chat import ToolCall
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.prompts import Prompt
from kimi_jax.standard_output import OutputConsole, harmless
from kimi_jax.text_output import Reader, Screen, StopStrings, as_json
from kimi_jax.tokenizer import Tokenizer

TEXTS = [
    "ok :smile: :warning: a:key:b",
    "[bold]x[/bold] [red]",
    "tab\there",
    "a\x1b[31mred\x1b[0m\x9b1m",
    "trail  \n\n",
    "bell\x07 \x08back\x7f",
    "cr\rlf\r\nnext",
    "nul\0z \x0c ff \x0b vt",
    "x" * 300,
    "a\u2028b\x85c\ufffd",
    "",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(BUNDLED_CHECKPOINT)


def shown(tokenizer, ids, *, size, raw=False, thinking=False, terminal=False, prompts=1, tools=()):
    """What goes to standard output when `ids` come in dispatches of `size`."""
    stop = tokenizer.special_id("<|im_end|>")
    readers = [Reader(tokenizer, (stop,), raw=raw, thinking=thinking, tools=tools) for _ in range(prompts)]
    screen, file = Screen([Prompt.of("\x1b]0;q\x07")] * prompts, readers), io.StringIO()
    screen.console = OutputConsole(file=file, force_terminal=terminal, color_system=None, soft_wrap=True)
    ids = [*ids, stop]
    for first in range(0, len(ids), size):
        for reader in readers:
            reader.push(ids[first : first + size], first + size >= len(ids))
        screen.update()
    return file.getvalue()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_pipe_gets_the_text_as_it_is(tokenizer, text, raw, size):
    assert shown(tokenizer, tokenizer.encode(text), size=size, raw=raw) == text + "\n"


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_terminal_is_told_of_control_characters_and_does_not_obey_them(tokenizer, size):
    text = "tab\there\x1b[2J \x9b2J \x07\x08\x7f cr\rlf\r\nnext :smile: [b]"
    expected = "tab\there␛[2J \\x9b2J ␇␈␡ cr␍lf\r\nnext :smile: [b]\n"
    assert shown(tokenizer, tokenizer.encode(text), size=size, terminal=True) == expected


def test_labels_and_calls_are_shown_like_the_text(tokenizer):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    calls = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ids = tokenizer.encode("a" + calls.format("functions.f:0", '{"x":\t"\x9b :key:"}'), allow_special=True)
    text = 'a\n→ f({"x":\t"%s :key:"})\n'
    assert shown(tokenizer, ids, size=3, tools=[tool], prompts=2) == "".join(
        f"── {number}: \x1b]0;q\x07\n" + text % "\x9b" for number in (1, 2)
    )
    assert shown(tokenizer, ids, size=3, tools=[tool], prompts=2, terminal=True) == "".join(
        f"── {number}: ␛]0;q␇\n" + text % "\\x9b" for number in (1, 2)
    )
    unnamed = tokenizer.encode(calls.format("call00003", "{}"), allow_special=True)
    assert shown(tokenizer, unnamed, size=3, tools=[tool]) == (
        "\n→ no call: the id 'call00003' names no declared tool; the declared tools are f: call00003({})\n"
    )


def test_json_keeps_every_character_in_one_line_of_utf8():
    value = {"text": "".join(TEXTS) + "\ud800é"}
    assert json.loads(as_json(value)) == value
    assert len(as_json(value).splitlines()) == 1
    as_json(value).encode()
    assert harmless(as_json(value)) == as_json(value)


def test_stop_strings_are_found_as_in_the_whole_text_however_it_is_cut():
    choose = random.Random(0)
    for _ in range(3000):
        text = "".join(choose.choice("ab") for _ in range(choose.randrange(12)))
        stops = ["".join(choose.choice("ab") for _ in range(choose.randrange(1, 5))) for _ in range(3)]
        places = [at for stop in stops if (at := text.find(stop)) >= 0]
        finder, got, left = StopStrings(stops), "", text
        while left:
            size = choose.randrange(1, 4)
            part, left = left[:size], left[size:]
            got += finder.push(part)
        got += finder.flush()
        assert (got, finder.ended) == (text[: min(places)] if places else text, bool(places))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_ends_the_answer_its_ids_and_its_calls(tokenizer, size):
    text = "think END</think>ab ENx END later<|tool_calls_section_begin|>"
    ids = tokenizer.encode(text, allow_special=True)
    reader = Reader(tokenizer, (), raw=False, thinking=True, stops=["zzz", "END"])
    kept, pieces = [], []
    for first in range(0, len(ids), size):
        kept += reader.push(ids[first : first + size], first + size >= len(ids))
        pieces += [piece.text for piece in reader.pending if piece.part == "answer"]
        reader.pending.clear()
    assert (reader.response.thinking, reader.response.answer) == ("think END", "ab ENx ")
    assert "".join(pieces) == "ab ENx "
    assert "" not in pieces
    assert tokenizer.decode(reader.ids).endswith("</think>ab ENx END")
    assert kept == reader.ids
    assert (reader.finished, reader.finish_reason, reader.response.tool_calls) == (True, "stop", ())


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(tokenizer):
    stop = tokenizer.special_id("<|im_end|>")
    reader = Reader(tokenizer, (stop,), raw=True, thinking=False, stops=["END"])
    reader.push(tokenizer.encode("the EN"), False)
    assert "".join(piece.text for piece in reader.pending) == "the "
    reader.push([stop], True)
    assert (reader.response.answer, reader.finish_reason) == ("the EN", "stop")
    calls = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>END"
    reader = Reader(tokenizer, (stop,), raw=False, thinking=False, stops=["END"])
    reader.push(tokenizer.encode(f"a{calls}<|tool_call_end|>", allow_special=True), True)
    assert reader.finish_reason == "length"  # what a call says is no part of the answer
    assert reader.response.tool_calls == (
        ToolCall("functions.f:0", "f", "END", "the arguments are not JSON: Expecting value: line 1 column 1 (char 0)"),
    )
