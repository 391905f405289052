"""Task families with answers a person can check: the small model's whole world, generated, nothing copied.

An example's `content` is what has to be known to answer it (the operands, the letters), whatever the phrasing. The
split goes by the content: a fact of the held-out split never occurs in training, under any phrasing.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np

Split = Literal["train", "heldout"]

HELD_OUT_OF = 10
"""One content in this many belongs to the held-out split."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with its only right answer."""

    family: str
    content: str
    prompt: str
    answer: str

    @property
    def split(self) -> Split:
        """The split this example belongs to, a function of its family and content alone."""
        digest = hashlib.sha256(f"{self.family}\0{self.content}".encode()).digest()
        return "heldout" if int.from_bytes(digest[:4], "big") % HELD_OUT_OF == 0 else "train"


LETTERS = "abcdefghijklmnopqrstuvwxyz"
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
"""29 February is left out, so that every day and month go with every year."""
UNITS = (("km", "m", 3), ("kg", "g", 3), ("m", "cm", 2), ("m", "mm", 3), ("cm", "mm", 1), ("t", "kg", 3))
"""Unit, smaller unit, power of ten between them."""
COLOURS = ("red", "blue", "green", "black", "white", "pink", "grey", "brown", "gold", "silver")
ANIMALS = ("fox", "bear", "owl", "cat", "dog", "wolf", "hen", "frog", "mouse", "goat")
NAMES = ("Mila", "Otto", "Nora", "Hugo", "Lena", "Emil", "Ida", "Karl", "Ruth", "Paul", "Vera", "Jonas")
PLACES = ("forest", "garden", "village", "valley", "castle", "harbour", "meadow", "mill")
THINGS = ("coin", "key", "map", "lamp", "ring", "bell", "book", "cake")
SPELLINGS_AVOIDED = ("as", "us")
"""Neighbouring letters that the tokenizer joins (they begin `assistant` and `user`), so no single letters to edit."""


def _word(rng: np.random.Generator, low: int, high: int) -> str:
    while True:
        word = "".join(rng.choice(list(LETTERS), rng.integers(low, high + 1)))
        if not any(pair in text for pair in SPELLINGS_AVOIDED for text in (word, word[::-1])):
            return word


def _pick(rng: np.random.Generator, *options: str) -> str:
    return options[rng.integers(len(options))]


def reverse(rng: np.random.Generator) -> Example:
    """Six to ten letters backwards."""
    word = _word(rng, 6, 10)
    prompt = _pick(rng, f'Reverse "{word}".', f'Write "{word}" backwards.')
    return Example("reverse", word, prompt, word[::-1])


def upper(rng: np.random.Generator) -> Example:
    """Six to ten letters in capitals."""
    word = _word(rng, 6, 10)
    prompt = _pick(rng, f'Write "{word}" in capitals.', f'Capitals for "{word}".')
    return Example("upper", word, prompt, word.upper())


def count(rng: np.random.Generator) -> Example:
    """How often a letter occurs, with a running tally after each letter."""
    while True:
        letters = rng.choice(list(LETTERS), 3, replace=False)
        word = "".join(rng.choice(letters, rng.integers(5, 9)))
        if not any(pair in word for pair in SPELLINGS_AVOIDED):
            break
    wanted = letters[0]
    tally, steps = 0, ""
    for letter in word:
        tally += letter == wanted
        steps += f"{letter}{tally}"
    prompt = _pick(rng, f'Count "{wanted}" in "{word}".', f'How many "{wanted}" are in "{word}"?')
    return Example("count", f"{wanted} {word}", prompt, f"{steps} total {tally}")


def add(rng: np.random.Generator) -> Example:
    """Two three-digit numbers, added in columns from the right with the carry written: 478 + 356 begins 8+6+0=14."""
    a, b = (int(x) for x in rng.integers(100, 1000, 2))
    carry, steps = 0, []
    for place in range(3):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x}+{y}+{carry}={total:02d}")
        carry = total // 10
    prompt = _pick(rng, f"Add {a} and {b}.", f"What is {a} + {b}?")
    return Example("add", f"{min(a, b)} {max(a, b)}", prompt, f"{', '.join(steps)} so {a + b}")


def sort(rng: np.random.Generator) -> Example:
    """Four to seven distinct digits in ascending order."""
    digits = [str(d) for d in rng.permutation(10)[: rng.integers(4, 8)]]
    ordered = sorted(digits)
    prompt = _pick(rng, f"Sort {' '.join(digits)}.", f"Put in order: {' '.join(digits)}.")
    return Example("sort", " ".join(ordered), prompt, " ".join(ordered))


def date(rng: np.random.Generator) -> Example:
    """A date from ISO form to words or back."""
    month = int(rng.integers(12))
    day, year = int(rng.integers(1, MONTH_DAYS[month] + 1)), int(rng.integers(1900, 2100))
    iso, words = f"{year}-{month + 1:02d}-{day:02d}", f"{day} {MONTHS[month]} {year}"
    if rng.integers(2):
        return Example("date", iso, f"Write the date {iso} in words.", words)
    return Example("date", iso, f"Write the date {words} in digits.", iso)


def unit(rng: np.random.Generator) -> Example:
    """A length or a mass in a smaller unit, by a power of ten that is written down."""
    value = int(rng.integers(2, 1000))
    large, small, power = UNITS[rng.integers(len(UNITS))]
    prompt = _pick(rng, f"Convert {value} {large} to {small}.", f"How many {small} are {value} {large}?")
    answer = f"{value} {large} = {value} * {10**power} {small} = {value * 10**power} {small}"
    return Example("unit", f"{value} {large} {small}", prompt, answer)


def to_json(rng: np.random.Generator) -> Example:
    """A record as JSON."""
    record = {"name": _word(rng, 3, 6), "age": int(rng.integers(10, 100)), "city": _word(rng, 3, 6)}
    listed = ", ".join(f"{key}={value}" for key, value in record.items())
    prompt = _pick(rng, f"Write as JSON: {listed}.", f"Give the JSON for {listed}.")
    return Example("json", listed, prompt, json.dumps(record))


def table(rng: np.random.Generator) -> Example:
    """A small table of names and colours: one row looked up and quoted, or all of them by name."""
    names = [str(name) for name in rng.permutation(NAMES)[: rng.integers(3, 7)]]
    colours = dict(zip(names, rng.permutation(COLOURS), strict=False))
    wanted = names[rng.integers(len(names))]

    def rows(order: list[str]) -> str:
        return ", ".join(f"{name} {colours[name]}" for name in order)

    if rng.integers(2):
        return Example("table", rows(names), f"Table: {rows(names)}. Sort by name.", f"Sorted: {rows(sorted(names))}.")
    prompt = f"Table: {rows(names)}. " + _pick(rng, f"Find {wanted}.", f"What is the colour of {wanted}?")
    answer = f"The table says {rows([wanted])}, so {wanted} has {colours[wanted]}."
    return Example("table", f"{rows(names)} {wanted}", prompt, answer)


def story(rng: np.random.Generator) -> Example:
    """Three sentences about whom, where and what the prompt names."""
    animal, name, place, thing = (_pick(rng, *options) for options in (ANIMALS, NAMES, PLACES, THINGS))
    prompt = _pick(
        rng,
        f"Tell a story about a {animal} named {name}, a {place} and a {thing}.",
        f"Write a story with a {place}, a {thing} and a {animal} named {name}.",
    )
    answer = (
        f"Once there was a {animal} named {name}. {name} lived near a {place}. "
        f"One day the {animal} found a {thing} in the {place}, and {name} was happy."
    )
    return Example("story", f"{animal} {name} {place} {thing}", prompt, answer)


FAMILIES: Mapping[str, Callable[[np.random.Generator], Example]] = {
    "add": add,
    "sort": sort,
    "count": count,
    "reverse": reverse,
    "upper": upper,
    "date": date,
    "unit": unit,
    "json": to_json,
    "table": table,
    "story": story,
}

MIXTURE: Mapping[str, float] = {
    "add": 1.5, "sort": 1.5, "count": 1.3, "reverse": 1.3, "upper": 1.0, "date": 1.0, "unit": 1.0, "json": 0.8,
    "table": 1.5, "story": 0.6,
}  # fmt: skip
"""How often training draws each family, relative to the others: more of what is harder to learn."""


def generate(family: str, split: Split, rng: np.random.Generator) -> Example:
    """Draws one example of a family that belongs to `split`."""
    while (example := FAMILIES[family](rng)).split != split:
        pass
    return example


def training_stream(rng: np.random.Generator) -> Iterator[Example]:
    """Endless training examples, families drawn by MIXTURE."""
    names = list(MIXTURE)
    weights = np.array([MIXTURE[name] for name in names])
    weights /= weights.sum()
    while True:
        yield generate(names[rng.choice(len(names), p=weights)], "train", rng)


def held_out(family: str, examples: int, seed: int = 0) -> list[Example]:
    """Distinct held-out prompts of one family, the same for every caller with the same seed."""
    rng = np.random.default_rng([seed, *family.encode()])
    found: dict[str, Example] = {}
    while len(found) < examples:
        example = generate(family, "heldout", rng)
        found[example.prompt] = example
    return list(found.values())
