"""Stop strings, characters and calls over the borders of tokens and dispatches: the same however the tokens come."""

import itertools
import random

import pytest

from kimi_jax.server.choices import Choice, Delta, merged
from kimi_jax.server.mailbox import News, Told
from kimi_jax.serving.events import Event
from kimi_jax.text_output import Reader


def follow(tokenizer, ids, sizes, *, stops=(), raw=True, thinking=False, tools=(), calls=True):
    """All deltas of a choice whose tokens come in pieces of given sizes."""
    end = tokenizer.special_id("<|im_end|>")
    choice = Choice(0, Reader(tokenizer, (end,), raw=raw, thinking=thinking, tools=tools, stops=stops), calls=calls)
    deltas, at = [], 0
    sizes = itertools.cycle(sizes)
    while not choice.finished:
        part = ids[at : at + next(sizes)]
        told = [Told(-float(index)) for index in range(at, at + len(part))]
        at += len(part)
        choice.take(News(Event("r", tuple(part), "length" if at >= len(ids) else None), told))
        if (delta := choice.delta()) is not None:
            deltas.append(delta)
    return choice, deltas


def whole(deltas):
    total = Delta()
    for delta in deltas:
        total.add(delta)
    return total


SIZES = [(1,), (2,), (3, 1), (100,)]
STOPS = [
    # text, stops, what is shown, what ends it, and the text up to the token that completes it
    ("one two three", ["two"], "one ", "two", "one two"),
    ("one two three", ["three", "two"], "one ", "two", "one two"),
    ("abcabd", ["abd"], "abc", "abd", "abcabd"),
    ("aabaac", ["aac", "ab"], "a", "ab", "aab"),
    ("abcx", ["abcd", "bc"], "a", "bc", "abc"),  # the shorter one counts once the longer one can no longer come
    ("abc", ["abcd", "bc"], "a", "bc", "abc"),  # and at the end of the text
    ("abab", ["abc"], "abab", None, "abab"),
    ("xx\n\nyy", ["\n"], "xx", "\n", "xx\n"),
    ("naïve 漢字 x", ["字"], "naïve 漢", "字", "naïve 漢字"),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("text", "stops", "shown", "ended", "upto"), STOPS)
@pytest.mark.parametrize("raw", [True, False])
def test_a_stop_string_ends_text_ids_and_log_probabilities(tokenizer, text, stops, shown, ended, upto, sizes, raw):
    ids = [token for byte in text.encode() for token in [byte_id(tokenizer, byte)]]
    choice, deltas = follow(tokenizer, ids, sizes, stops=stops, raw=raw)
    total = whole(deltas)
    assert total.content == shown
    assert total.stop_reason == ended
    assert total.finish_reason == ("stop" if ended else "length")
    kept = len(upto.encode())
    assert total.ids == ids[:kept] == choice.reader.ids
    assert [told.logprob for told in total.told] == [-float(index) for index in range(kept)]
    assert choice.tokens == kept
    assert all(delta.content or delta.finish_reason for delta in deltas), "nothing empty"
    told = [(len(each.ids), len(each.content.encode())) for each in deltas]
    assert all(
        sum(ids) >= sum(bytes_) for ids, bytes_ in (zip(*told[:end], strict=True) for end in range(1, len(told)))
    )


def byte_id(tokenizer, byte):
    """The token that is one byte."""
    return next(token for token in range(tokenizer.n_base) if tokenizer.token_bytes(token) == bytes([byte]))


def test_random_texts_are_cut_as_a_search_in_the_whole_would_cut_them(tokenizer):
    chosen = random.Random(0)
    letters = {letter: byte_id(tokenizer, ord(letter)) for letter in "ab"}
    for _ in range(300):
        text = "".join(chosen.choices("ab", k=12))
        stops = ["".join(chosen.choices("ab", k=chosen.randint(1, 4))) for _ in range(chosen.randint(1, 3))]
        found = min(((text.find(stop), len(stop)) for stop in stops if stop in text), default=None)
        sizes = [chosen.randint(1, 4) for _ in range(5)]
        total = whole(follow(tokenizer, [letters[letter] for letter in text], sizes, stops=stops)[1])
        assert total.content == (text if found is None else text[: found[0]]), (text, stops)
        assert len(total.ids) == (len(text) if found is None else sum(found)), (text, stops)


@pytest.mark.parametrize("sizes", SIZES)
def test_stop_strings_in_thinking_and_in_calls_are_text(tokenizer, sizes):
    text = (
        "so END it</think>Hm<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": "END"}<|tool_call_end|><|tool_calls_section_end|> then END of it<|im_end|>'
    )
    ids = tokenizer.encode(text, allow_special=True)
    total = whole(follow(tokenizer, ids, sizes, stops=["END"], raw=False, thinking=True)[1])
    assert total.reasoning == "so END it"
    assert total.content == "Hm then "
    (call,) = merged(total.calls)
    assert (call.id, call.name, call.arguments) == ("functions.f:0", "f", '{"a": "END"}')
    assert total.finish_reason == "tool_calls"


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("written", "calls", "content", "reason"),
    [
        ("<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>", ["f"], "", "tool_calls"),
        # An id that names nothing is no call; what the model wrote is not lost.
        (
            "<|tool_call_begin|>call_1<|tool_call_argument_begin|>{}<|tool_call_end|>", [],
            "<|tool_call_begin|>call_1<|tool_call_argument_begin|>{}<|tool_call_end|>", "stop",
        ),
        (
            "<|tool_call_begin|>functions.f:0<|tool_call_end|>", [],
            "<|tool_call_begin|>functions.f:0<|tool_call_end|>", "stop",
        ),
        # Behind one that is none the next one is the client's first.
        (
            "<|tool_call_begin|>x<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>", ["g"],
            "<|tool_call_begin|>x<|tool_call_argument_begin|>{}<|tool_call_end|>", "tool_calls",
        ),
        # Arguments that are no JSON are the client's to judge.
        ("<|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{oh<|tool_call_end|>", ["g"], "", "tool_calls"),
    ],
)  # fmt: skip
def test_calls_that_are_none_are_text(tokenizer, sizes, written, calls, content, reason):
    ids = tokenizer.encode(f"<|tool_calls_section_begin|>{written}<|im_end|>", allow_special=True)
    total = whole(follow(tokenizer, ids, sizes, raw=False, tools=TOOLS)[1])
    assert [call.name for call in merged(total.calls)] == calls
    assert [call.index for call in merged(total.calls)] == [*range(len(calls))]
    assert total.content == content
    assert total.finish_reason == reason


@pytest.mark.parametrize("sizes", SIZES)
def test_a_call_that_the_limit_cuts_off_is_told_as_far_as_it_goes(tokenizer, sizes):
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>" + '{"a": "b'
    total = whole(follow(tokenizer, tokenizer.encode(text, allow_special=True), sizes, raw=False, tools=TOOLS)[1])
    (call,) = merged(total.calls)
    assert call.arguments == '{"a": "b'
    assert total.finish_reason == "length"
