"""The small model's tokens: one for every word and mark of the tasks' fixed text, single characters for the rest."""

import re
from pathlib import Path

import numpy as np

from kimi_jax.tokenizer import Tokenizer, write_tokenizer
from kimi_jax.training.tasks import FAMILIES, MONTHS

ROLE_NAMES = ("user", "assistant")
MARKS = ('{"', '":', ' "', '",', '"}', '".', '"?', " =", " *", " +")
"""Runs of punctuation, which the split pattern keeps together."""

_SPACED_WORD = re.compile(r" (?:[A-Za-z][a-z]+|[A-Z]{2,})")
_FIRST_WORD = re.compile(r"^[A-Z][a-z]+")


def words(samples: int = 400) -> list[str]:
    """Words of the tasks' fixed text as the split pattern cuts them: with their leading space, or at the start."""
    found: set[str] = {f" {month}" for month in MONTHS}
    rng = np.random.default_rng(0)
    for family in FAMILIES.values():
        for _ in range(samples):
            example = family(rng)
            for text in (example.prompt, example.answer):
                found.update(_SPACED_WORD.findall(text))
                found.update(_FIRST_WORD.findall(text))
    return sorted(found | set(ROLE_NAMES))


def token_list() -> list[bytes]:
    """Multi-byte tokens in merge order: each word from left to right, so that only its own beginnings are added."""
    tokens: dict[bytes, None] = {}
    for text in (*MARKS, *words()):
        data = text.encode()
        for end in range(2, len(data) + 1):
            tokens.setdefault(data[:end])
    return list(tokens)


def write_small_tokenizer(directory: Path) -> Tokenizer:
    """Writes the small model's tokenizer files and reads them back."""
    write_tokenizer(directory, token_list())
    return Tokenizer.from_directory(directory)
