"""Kimi's byte-level BPE tokenizer, read from a checkpoint's `tiktoken.model` and `tokenizer_config.json`.

The BPE itself is tiktoken's; this module adds what Kimi K2.6 needs around it: the split pattern, the special ids
behind the base ranks (gaps keep their ids under reserved names), the cutting of very long texts, and decoding that
never shows half a character. Text is text: a special token's name inside it is encoded as ordinary characters.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

VOCABULARY_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

N_SPECIAL = 256
"""Ids reserved behind the base ranks for special tokens (named or not)."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
"""What an id without a meaning says."""

SPECIAL_TOKENS: Mapping[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Kimi K2.6's special tokens by their distance from the first special id (163584 in the released checkpoint)."""

# Tool and thinking markers are part of what the model says; they stay when special tokens are skipped.
_SHOWN_TOKENS = frozenset(
    {
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<think>",
        "</think>",
    }
)

# The split pattern of Moonshot's tokenization_kimi.py: `&&` intersects character classes, so that words of other
# scripts never swallow Han characters, which form runs of their own.
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Cutting rules of the same file. They are part of the tokenization: a cut changes the ids around it.
MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")


class TokenizerError(ValueError):
    """A tokenizer file, id or name that cannot be used; the message names it and the fix."""


class Tokenizer:
    """Kimi's tokenizer: base ranks `0 .. n_base - 1`, special ids `n_base .. vocab_size - 1`.

    Attributes:
        n_base: number of base ranks, which is also the first special id.
        vocab_size: number of ids the tokenizer knows, `n_base + 256`.
        special_ids: every special token's id by name, reserved names included.
    """

    def __init__(self, ranks: Mapping[bytes, int], names: Mapping[int, str], shown: Iterable[int] = ()):
        """Build a tokenizer; `from_directory` is the usual way.

        Args:
            ranks: rank of every base token; the ranks are 0 .. len(ranks) - 1.
            names: special token names by id; ids without a name become `<|reserved_token_{id}|>`.
            shown: special ids that `skip_special` keeps, such as the thinking and tool markers.
        """
        self.n_base = len(ranks)
        self.vocab_size = self.n_base + N_SPECIAL
        special = {i: names.get(i, f"<|reserved_token_{i}|>") for i in range(self.n_base, self.vocab_size)}
        self.special_ids: Mapping[str, int] = {name: i for i, name in special.items()}
        if len(self.special_ids) != N_SPECIAL:
            raise TokenizerError(f"added_tokens_decoder: {_named_twice(special)}")
        self._bytes = [b""] * self.n_base + [name.encode() for name in special.values()]
        for token, rank in ranks.items():
            self._bytes[rank] = token
        self._skipped = frozenset(range(self.n_base, self.vocab_size)) - frozenset(shown)
        self._bpe = tiktoken.Encoding(
            "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(self.special_ids)
        )

    @classmethod
    def from_directory(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json` of a checkpoint directory.

        Args:
            path: directory holding both files.
            vocab_size: rows of the model's embedding, if known; a tokenizer with more ids is refused.

        Raises:
            FileNotFoundError: a file is missing.
            TokenizerError: a file is broken, or the tokenizer does not fit `vocab_size`.
        """
        directory = Path(path)
        ranks = _read_ranks(_existing(directory, VOCABULARY_FILE))
        config = _existing(directory, CONFIG_FILE)
        names, shown = _read_special(config, len(ranks))
        if vocab_size is not None and len(ranks) + N_SPECIAL > vocab_size:
            raise TokenizerError(
                f"{directory}: the tokenizer has {len(ranks) + N_SPECIAL} ids but the model's vocab_size is "
                f"{vocab_size}; take both from the same checkpoint"
            )
        try:
            return cls(ranks, names, shown)
        except TokenizerError as error:
            raise TokenizerError(f"{config}: {error}; take the file from the checkpoint") from None

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`.

        Special token names in the text are encoded as ordinary characters, so that no user can write a control
        token; `allow_special=True` turns them into their ids and is for text the program itself composed.
        """
        ids: list[int] = []
        for piece in _pieces(text):
            if allow_special:
                ids += self._bpe.encode(piece, allowed_special="all")
            else:
                ids += self._bpe.encode(piece, disallowed_special=())
        return ids

    def special_id(self, name: str) -> int:
        """Id of the special token `name`, for example `<|im_end|>`.

        Raises:
            TokenizerError: there is no such special token.
        """
        try:
            return self.special_ids[name]
        except KeyError:
            known = ", ".join(n for n in self.special_ids if not n.startswith("<|reserved_token_"))
            raise TokenizerError(f"no special token {name!r} in this tokenizer; it has {known}") from None

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token, named or reserved."""
        return self.n_base <= token_id < self.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a special token's are its name.

        Raises:
            TokenizerError: the id is negative or not below `vocab_size`.
        """
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {token_id} is outside this tokenizer's 0 .. {self.vocab_size - 1}")
        return self._bytes[token_id]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave out control tokens ("special": true in tokenizer_config.json, and reserved ids).
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def decoder(self, *, skip_special: bool = False) -> IncrementalDecoder:
        """A decoder for one stream of ids; see `IncrementalDecoder`."""
        return IncrementalDecoder(self, skip_special=skip_special)

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The bytes that `ids` stand for; they may end within a character.

        Ids beyond the vocabulary, such as padding rows of a model's head, are U+FFFD.
        """
        bytes_of = (UNKNOWN if i >= self.vocab_size else self.token_bytes(i)
                    for i in ids if not (skip_special and i in self._skipped))  # fmt: skip
        return b"".join(bytes_of)


class IncrementalDecoder:
    """Decodes one request's ids as they arrive; its pieces joined are `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text completed by `ids`; the bytes of an unfinished character wait for the next call."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids, skip_special=self._skip_special))

    def flush(self) -> str:
        """End of the stream: U+FFFD for bytes left of an unfinished character, else nothing."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def write_tokenizer(directory: Path, tokens: Sequence[bytes]) -> None:
    """Write a small tokenizer with Kimi K2.6's file layout and special tokens.

    The 256 single bytes take ranks 0 .. 255 and `tokens` the ranks after them, in order. The special tokens follow
    at K2.6's distances, so the vocabulary has `256 + len(tokens) + 256` ids.

    Args:
        directory: where `tiktoken.model` and `tokenizer_config.json` are written; created if it is missing.
        tokens: the multi-byte tokens. Byte-pair merging must be able to reach each from the ones before it.

    Raises:
        TokenizerError: a token is a single byte or empty, appears twice, or cannot be merged.
    """
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in tokens:
        if len(token) < 2:
            raise TokenizerError(f"token {token!r} has fewer than two bytes; single bytes are added on their own")
        if token in ranks:
            raise TokenizerError(f"token {token!r} is listed twice")
        parts = _merge(token, ranks)
        if len(parts) != 2:
            raise TokenizerError(
                f"token {token!r} cannot be merged: the tokens before it give {parts}, and a merge joins exactly two; "
                "list the missing part first"
            )
        ranks[token] = len(ranks)
    added = {
        str(len(ranks) + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _SHOWN_TOKENS,
        }
        for offset, name in SPECIAL_TOKENS.items()
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (directory / VOCABULARY_FILE).write_bytes(b"".join(lines))
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        chunk = text[start : start + MAX_ENCODE_CHARS]
        begin = 0
        for run in _RUN.finditer(chunk):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield chunk[begin:cut]
                begin = cut
        yield chunk[begin:]


def _merge(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Byte-pair merging of `token`: always join the neighbours whose union has the lowest rank."""
    parts = [bytes([byte]) for byte in token]
    while True:
        joins = [(ranks[pair], i) for i in range(len(parts) - 1) if (pair := parts[i] + parts[i + 1]) in ranks]
        if not joins:
            return parts
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def _named_twice(special: Mapping[int, str]) -> str:
    first: dict[str, int] = {}
    for i, name in special.items():
        if first.setdefault(name, i) != i:
            return f"{name!r} is the name of the ids {first[name]} and {i}; a special token has one"
    raise AssertionError("every name is of one id")


def _existing(directory: Path, name: str) -> Path:
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory; give the checkpoint directory that holds {name}")
    if not (directory / name).is_file():
        raise FileNotFoundError(
            f"{directory / name} is missing; the tokenizer needs {VOCABULARY_FILE} and {CONFIG_FILE} from the "
            "checkpoint (download the missing file into this directory)"
        )
    return directory / name


def _read_ranks(path: Path) -> dict[bytes, int]:
    fix = "download the file again"
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{path} line {number} is not 'base64-token rank': {line[:60]!r}; {fix}") from None
        if len(ranks) != number or int(rank) != number - 1:
            raise TokenizerError(
                f"{path} line {number}: expected a new token of rank {number - 1}, found rank {int(rank)} "
                f"for {line.split()[0][:60]!r}; ranks must count up from 0 with no token twice; {fix}"
            )
    absent = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if absent:
        raise TokenizerError(
            f"{path} has {len(ranks)} tokens but not the single byte 0x{absent[0]:02x} ({len(absent)} bytes missing), "
            f"so it could not encode every text; {fix}"
        )
    return ranks


def _read_special(path: Path, n_base: int) -> tuple[dict[int, str], list[int]]:
    """Special names by id, and the ids that are not flagged special (shown even where special tokens are skipped)."""
    try:
        added = json.loads(path.read_text(encoding="utf-8"))["added_tokens_decoder"]
        entries = {int(i): (str(entry["content"]), bool(entry.get("special", True))) for i, entry in added.items()}
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TokenizerError(f"{path} is not JSON ({error}); download the file again") from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise TokenizerError(
            f"{path} has no usable 'added_tokens_decoder' (ids mapped to entries with 'content'), which names the "
            "special tokens; take the file from the checkpoint"
        ) from None
    outside = [i for i in sorted(entries) if not n_base <= i < n_base + N_SPECIAL]
    if outside:
        raise TokenizerError(
            f"{path}: special token {entries[outside[0]][0]!r} has id {outside[0]}, outside {n_base} .. "
            f"{n_base + N_SPECIAL - 1} set by the {n_base} ranks of {VOCABULARY_FILE}; take both files from the same "
            "checkpoint"
        )
    return {i: name for i, (name, _) in entries.items()}, [i for i, (_, special) in entries.items() if not special]
