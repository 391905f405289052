"""Answers are checked by independent means, not by the generator's own arithmetic."""

import collections
import datetime
import itertools
import json
import re

import numpy as np
import pytest

from kimi_jax.training import tasks
from kimi_jax.training.tasks import FAMILIES, generate, held_out


def examples(family, number=60):
    return held_out(family, number, seed=3)


def quoted(text):
    return re.findall(r'"(\w+)"', text)


def test_reverse_and_capitals():
    for example in examples("reverse"):
        (word,) = quoted(example.prompt)
        assert list(example.answer) == list(reversed(word))
    for example in examples("upper"):
        (word,) = quoted(example.prompt)
        assert example.answer.lower() == word
        assert example.answer.isupper()


def test_count_tallies_each_letter():
    for example in examples("count"):
        letter, word = quoted(example.prompt)
        steps, total = example.answer.split(" total ")
        assert int(total) == collections.Counter(word)[letter]
        assert re.sub(r"\d", "", steps) == word
        assert [int(n) for n in re.findall(r"\d", steps)] == [word[: i + 1].count(letter) for i in range(len(word))]


def test_add_steps_hold_and_lead_to_the_sum():
    for example in examples("add"):
        a, b = map(int, re.findall(r"\d+", example.prompt))
        steps, total = example.answer.split(" so ")
        assert int(total) == a + b
        columns = re.findall(r"(\d)\+(\d)\+(\d)=(\d\d)", steps)
        assert len(columns) == 3
        assert all(int(x) + int(y) + int(c) == int(s) for x, y, c, s in columns)
        assert "".join(x for x, *_ in reversed(columns)) == str(a)
        assert [c for *_, c, _ in columns] == ["0", columns[0][3][0], columns[1][3][0]]


def test_sort_is_a_permutation_in_order():
    for example in examples("sort"):
        asked, answered = re.findall(r"\d", example.prompt), re.findall(r"\d", example.answer)
        assert sorted(asked) == sorted(answered)
        assert all(x < y for x, y in itertools.pairwise(answered))


def test_dates_agree_with_the_calendar():
    for example in examples("date"):
        texts = example.prompt + " | " + example.answer
        iso = re.search(r"\d{4}-\d\d-\d\d", texts).group()
        words = re.search(r"\d+ [A-Z][a-z]+ \d{4}", texts).group()
        assert datetime.date.fromisoformat(iso) == datetime.datetime.strptime(words, "%d %B %Y").date()


def test_units_by_the_metre_and_the_gram():
    metres = {"km": 1000.0, "m": 1.0, "cm": 0.01, "mm": 0.001, "t": 1e6, "kg": 1000.0, "g": 1.0}
    for example in examples("unit"):
        pattern = r"(\d+) (\w+) = (\d+) \* (\d+) (\w+) = (\d+) (\w+)"
        value, large, again, factor, small, result, last = re.fullmatch(pattern, example.answer).groups()
        assert (value, small) == (again, last)
        assert int(value) * int(factor) == int(result)
        assert metres[large] / metres[small] == pytest.approx(int(factor))
        assert f"{value} {large}" in example.prompt


def test_json_holds_the_record_of_the_prompt():
    for example in examples("json"):
        record = json.loads(example.answer)
        assert {key: str(value) for key, value in record.items()} == dict(re.findall(r"(\w+)=(\w+)", example.prompt))


def test_tables_are_quoted_and_sorted():
    kinds = set()
    for example in examples("table"):
        listed, question = example.prompt.removesuffix(".").removeprefix("Table: ").split(". ")
        rows = [tuple(row.split(" ")) for row in listed.split(", ")]
        kinds.add(question.split()[0])
        if question == "Sort by name":
            answered = example.answer.removeprefix("Sorted: ").removesuffix(".").split(", ")
            assert answered == [" ".join(row) for row in sorted(rows)]
            continue
        pattern = r"The table says (\w+) (\w+), so (\w+) has (\w+)\."
        quoted, colour, name, again = re.fullmatch(pattern, example.answer).groups()
        assert quoted == name
        assert dict(rows)[name] == colour == again
        assert question.rstrip("?").endswith(name)
    assert kinds == {"Find", "What", "Sort"}


def test_training_draws_families_by_their_weights():
    """Shares of 6,000 draws: the largest standard deviation is 0.005."""
    streams = (tasks.training_stream(np.random.default_rng(seed)) for seed in range(3))
    drawn = [next(stream).family for stream in streams for _ in range(2000)]
    total = sum(tasks.MIXTURE.values())
    for family, weight in tasks.MIXTURE.items():
        assert drawn.count(family) / len(drawn) == pytest.approx(weight / total, abs=0.02)


def test_story_uses_what_the_prompt_names():
    for example in examples("story"):
        for word in example.content.split():
            assert word in example.prompt
            assert word in example.answer


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_content(family):
    rng = np.random.default_rng(0)
    train = {generate(family, "train", rng).content for _ in range(300)}
    held = {example.content for example in examples(family)}
    assert not train & held
    assert [example.prompt for example in examples(family)] == [example.prompt for example in examples(family)]


def test_the_split_goes_by_content_not_by_phrasing():
    rng = np.random.default_rng(1)
    splits = collections.defaultdict(set)
    prompts = collections.defaultdict(set)
    for _ in range(4000):
        example = tasks.sort(rng)
        splits[example.content].add(example.split)
        prompts[example.content].add(example.prompt)
    assert max(map(len, prompts.values())) > 1
    assert all(len(found) == 1 for found in splits.values())
