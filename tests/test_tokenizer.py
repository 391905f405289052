"""Tokenizer against ids from Moonshot's own code (data/chat_golden.json), and what it does with bad files."""

import base64
import hashlib
import json
import random
from pathlib import Path

import pytest

from kimi_jax.tokenizer import N_SPECIAL, SPECIAL_TOKENS, Tokenizer, TokenizerError, write_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "data" / "chat_golden.json").read_text(encoding="utf-8"))
TOKENS = [bytes.fromhex(token) for token in GOLDEN["tokens"]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, TOKENS)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def edit_config(directory: Path, target: Path, change) -> Path:
    """Copy a tokenizer directory, changing its parsed tokenizer_config.json."""
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (target / name).write_bytes((directory / name).read_bytes())
    config = json.loads((target / "tokenizer_config.json").read_text())
    change(config)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=lambda case: repr(case["text"][:20]))
def test_text_ids_equal_the_reference(tokenizer, case):
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["texts_with_special"], ids=lambda case: repr(case["text"][:20]))
def test_special_names_become_special_ids_only_when_allowed(tokenizer, case):
    assert tokenizer.encode(case["text"], allow_special=True) == case["ids"]


@pytest.mark.parametrize("case", GOLDEN["long_texts"], ids=lambda case: str(case["parts"])[:30])
def test_long_texts_are_cut_where_the_reference_cuts(tokenizer, case):
    ids = tokenizer.encode("".join(unit * times for unit, times in case["parts"]))
    assert len(ids) == case["count"]
    assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == case["sha256"]


def test_no_special_token_can_be_written_in_a_text(tokenizer):
    for name in tokenizer.special_ids:
        ids = tokenizer.encode(f"x{name}y {name}")
        assert max(ids) < tokenizer.n_base
        assert tokenizer.decode(ids) == f"x{name}y {name}"
        assert tokenizer.encode(f"x{name}", allow_special=True)[-1] == tokenizer.special_id(name)


def test_special_ids_keep_their_distance_and_gaps_are_reserved(tokenizer):
    first = 256 + len(TOKENS)
    assert tokenizer.n_base == first
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.special_id("[BOS]") == first
    assert tokenizer.special_id("<|im_end|>") == first + 2
    assert tokenizer.special_id("</think>") == first + 23
    assert tokenizer.special_id("[PAD]") == first + 255
    assert tokenizer.special_id(f"<|reserved_token_{first + 5}|>") == first + 5
    assert len(tokenizer.special_ids) == N_SPECIAL
    assert not tokenizer.is_special(first - 1)
    assert tokenizer.is_special(first + 5)
    assert not tokenizer.is_special(first + 256)


def test_unknown_special_name_lists_the_known_ones(tokenizer):
    with pytest.raises(TokenizerError, match=r"'<\|im_ende\|>'.*<\|im_end\|>"):
        tokenizer.special_id("<|im_ende|>")


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for bad in (-1, tokenizer.vocab_size, 163_841):
        with pytest.raises(TokenizerError, match=rf"token id {bad} is outside"):
            tokenizer.token_bytes(bad)


def test_skip_special_keeps_thinking_and_tool_markers(tokenizer):
    text = "<|im_assistant|><think>a</think>b<|tool_call_begin|>c<|im_end|>[EOS]"
    ids = [*tokenizer.encode(text, allow_special=True), tokenizer.n_base + 5]
    assert tokenizer.decode(ids[:-1]) == text
    assert tokenizer.decode(ids, skip_special=True) == "<think>a</think>b<|tool_call_begin|>c"


def test_streaming_never_shows_half_a_character(tokenizer):
    text = "a\U0001f600é中"
    ids = [byte for byte in text.encode()]  # every byte is a token of its own
    decoder = tokenizer.decoder()
    assert [decoder.push([i]) for i in ids] == ["a", "", "", "", "\U0001f600", "", "é", "", "", "中"]
    assert decoder.flush() == ""
    assert decoder.push(ids[:3]) == "a"
    assert decoder.flush() == "\ufffd"
    assert decoder.push(ids[:1]) == "a"


def test_streamed_pieces_join_to_the_whole_decoding(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(40))]
        for skip in (False, True):
            decoder = tokenizer.decoder(skip_special=skip)
            pieces = [decoder.push([i]) for i in ids] + [decoder.flush()]
            assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)


def test_model_vocabulary_smaller_than_the_tokenizer_is_refused(directory, tokenizer):
    assert Tokenizer.from_directory(directory, vocab_size=tokenizer.vocab_size).vocab_size == tokenizer.vocab_size
    with pytest.raises(TokenizerError, match=rf"{tokenizer.vocab_size} ids .* vocab_size is {tokenizer.n_base}"):
        Tokenizer.from_directory(directory, vocab_size=tokenizer.n_base)


def test_real_size_comes_from_the_file(tmp_path):
    """163,584 ranks, as in the released checkpoint: bytes, all pairs, and triples."""
    tokens = [bytes([a]) for a in range(256)]
    tokens += [bytes([a, b]) for a in range(256) for b in range(256)]
    tokens += [bytes([a, b, c]) for a in range(2) for b in range(256) for c in range(256)][: 163_584 - len(tokens)]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    added = {str(163_584 + offset): {"content": name} for offset, name in SPECIAL_TOKENS.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = Tokenizer.from_directory(tmp_path, vocab_size=163_840)
    assert tokenizer.vocab_size == 163_840
    assert tokenizer.special_id("<|im_end|>") == 163_586
    assert tokenizer.special_id("<think>") == 163_606
    assert tokenizer.special_id("[PAD]") == 163_839
    assert tokenizer.special_id("<|reserved_token_163600|>") == 163_600
    assert tokenizer.decode(tokenizer.encode("hello 你好")) == "hello 你好"


def test_missing_files_are_named(directory, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a directory; give the checkpoint directory"):
        Tokenizer.from_directory(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"tiktoken\.model is missing"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes((directory / "tiktoken.model").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config\.json is missing.*download"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [b"not base64! 0", *lines[1:]], r"line 1 is not 'base64-token rank'"),
        (lambda lines: [*lines[:300], lines[300].split()[0]], r"line 301 is not"),
        (lambda lines: [*lines[:300], *lines[301:]], r"line 301: expected a new token of rank 300, found rank 301"),
        (lambda lines: [*lines[:300], lines[299].split()[0] + b" 300"], r"line 301: .* with no token twice"),
        (lambda lines: lines[:200], r"200 tokens but not the single byte 0xc8 \(56 bytes missing\)"),
        (lambda lines: [b"version https://git-lfs.github.com/spec/v1"], r"line 1 is not"),
    ],
)
def test_broken_vocabulary_is_refused_with_its_line(directory, tmp_path, change, message):
    edit_config(directory, tmp_path, lambda config: None)
    lines = (directory / "tiktoken.model").read_bytes().splitlines()
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(change(lines)))
    with pytest.raises(TokenizerError, match=rf"tiktoken\.model.*{message}"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.pop("added_tokens_decoder"), "no usable 'added_tokens_decoder'"),
        (lambda config: config.update(added_tokens_decoder={"x": {"content": "a"}}), "no usable"),
        (lambda config: config["added_tokens_decoder"].update({"5": {"content": "<x>"}}), "'<x>' has id 5, outside"),
        (lambda config: config["added_tokens_decoder"].update({"9999": {"content": "<x>"}}), "has id 9999, outside"),
        (
            lambda config: config["added_tokens_decoder"].update({"400": {"content": "<think>"}}),
            "added_tokens_decoder: .<think>. is the name of the ids 400 and 404",
        ),
    ],
)
def test_broken_config_is_refused(directory, tmp_path, change, message):
    edit_config(directory, tmp_path, change)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_config_that_is_not_json_is_refused(directory, tmp_path):
    edit_config(directory, tmp_path, lambda config: None)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([b"ab", b"abcd"], r"b'abcd' cannot be merged: the tokens before it give \[b'ab', b'c', b'd'\]"),
        # "ab" is taken first, so the pieces "a" and "bc" never meet.
        ([b"ab", b"bc", b"cd", b"abc", b"xbcd"], r"b'xbcd' cannot be merged"),
        ([b"ab", b"ab"], r"b'ab' is listed twice"),
        ([b"a"], r"b'a' has fewer than two bytes"),
        ([b""], r"b'' has fewer than two bytes"),
    ],
)
def test_writer_refuses_tokens_that_no_text_would_reach(tmp_path, tokens, message):
    with pytest.raises(TokenizerError, match=message):
        write_tokenizer(tmp_path, tokens)
    assert not list(tmp_path.iterdir())


def test_every_written_token_is_reached(tokenizer):
    for rank, token in enumerate(TOKENS, 256):
        assert tokenizer.token_bytes(rank) == token
        assert tokenizer._bpe._encode_single_piece(token) == [rank]


def test_ids_beyond_the_vocabulary_are_shown_as_unknown(tmp_path):
    """A model's head may have more rows than the tokenizer has ids; the text goes on."""
    write_tokenizer(tmp_path, [])
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.decode([72, tokenizer.vocab_size, 105, 10**6]) == "H\ufffdi\ufffd"
    decoder = tokenizer.decoder()
    assert decoder.push([72, 0xC3]) + decoder.push([tokenizer.vocab_size, 105]) + decoder.flush() == "H\ufffd\ufffdi"
    with pytest.raises(TokenizerError, match="token id -1 is outside"):
        tokenizer.decode([-1])
