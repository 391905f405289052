"""The model's log-probabilities beside those that another engine gave for the same ids, in vLLM's form."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kimi_jax import text_files
from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.forcing import force, logits_of
from kimi_jax.evaluation.logits import InputError


@dataclasses.dataclass(frozen=True)
class Reference:
    """Ids, and for each of them the log-probabilities of some tokens in its place, given the ids before."""

    ids: Sequence[int]
    log_probabilities: Sequence[Mapping[int, float]]
    """One for each id; empty for the first, which nothing comes before."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far the model's log-probabilities are from a reference's. Places count from one."""

    places: int
    """Ids that were compared, those at the beginning of a row excepted."""
    values: int
    """Log-probabilities that were compared."""
    mean_difference: float
    """Mean of |difference|, in nats."""
    largest_difference: float
    largest_at: tuple[int, int, int]
    """Row, place in it, token id."""
    same_top_token: float | None
    """Share of the places with two or more reference values whose likeliest token is the model's; None without any."""
    perplexity: float
    reference_perplexity: float
    """Of the ids themselves, over the places where the reference has theirs."""


def read_references(path: Path, vocab_size: int) -> list[Reference]:
    """A JSON Lines file of objects with `prompt_token_ids` and `prompt_logprobs`, as vLLM answers.

    `prompt_logprobs` has an entry for each id, the first null, the others objects of token id to a number or to an
    object with `logprob`.

    Raises:
      InputError: naming the line and what is wrong with it.
    """
    references = []
    for number, line in enumerate(text_files.lines_of(text_files.read_text(path)), 1):
        if line.strip():
            try:
                references.append(_reference(json.loads(line), vocab_size))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {number}: expected prompt_token_ids and prompt_logprobs of equal length, "
                    f"as vLLM gives them ({type(error).__name__}: {error})"
                ) from None
    if not references:
        raise InputError(f"{path}: no lines; expected JSON objects with prompt_token_ids and prompt_logprobs")
    return references


def _reference(row: Any, vocab_size: int) -> Reference:
    ids, given = row["prompt_token_ids"], row["prompt_logprobs"]
    if len(ids) != len(given) or len(ids) < 2:
        raise ValueError(f"{len(ids)} ids and {len(given)} entries; two or more of each make a comparison")
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]:
        raise ValueError(f"{wrong[0]!r} is no id of 0..{vocab_size - 1}")
    entries = []
    for entry in given:
        values = {int(i): float(v["logprob"] if isinstance(v, dict) else v) for i, v in (entry or {}).items()}
        if wrong := [i for i, v in values.items() if not 0 <= i < vocab_size or not -math.inf < v <= 1e-3]:
            raise ValueError(f"the value of token {wrong[0]} is no log-probability of the vocabulary")
        entries.append(values)
    if entries[0]:
        raise ValueError("the first entry is not null, but nothing comes before the first id")
    if not any(entries):
        raise ValueError("no entry has a log-probability")
    return Reference(ids, entries)


def agreement(
    engine: Engine, references: Sequence[Reference], progress: Callable[[int], None] | None = None
) -> Agreement:
    """Runs the ids of all references, one after the other, and compares. `progress` is told how many ids are done."""
    differences: list[float] = []
    places: list[tuple[int, int, int]] = []
    tops: list[bool] = []
    own: list[tuple[float, float]] = []
    longest = max(len(reference.ids) for reference in references)
    for number, reference in enumerate(references, 1):
        for chunk in force(engine, logits_of, [reference.ids], length=longest):
            for row, logits in enumerate(chunk.values[0, : chunk.counts[0]], chunk.first):
                entry = reference.log_probabilities[row + 1] if row + 1 < len(reference.ids) else {}
                if not entry:
                    continue
                tokens = list(entry)
                here = logits[tokens] - _log_sum(logits)
                differences += np.abs(here - list(entry.values())).tolist()
                places += [(number, row + 2, token) for token in tokens]
                if len(tokens) > 1:
                    tops.append(int(logits.argmax()) == max(tokens, key=entry.__getitem__))
                if (token := reference.ids[row + 1]) in entry:
                    own.append((float(here[tokens.index(token)]), entry[token]))
            if progress:
                progress(chunk.counts[0])
    largest = int(np.argmax(differences))
    mean_own = np.mean(own or [(math.nan, math.nan)], axis=0)
    return Agreement(
        places=len({place[:2] for place in places}),
        values=len(differences),
        mean_difference=float(np.mean(differences)),
        largest_difference=differences[largest],
        largest_at=places[largest],
        same_top_token=sum(tops) / len(tops) if tops else None,
        perplexity=float(np.exp(-mean_own[0])),
        reference_perplexity=float(np.exp(-mean_own[1])),
    )


def _log_sum(logits: Float[np.ndarray, " vocab"]) -> float:
    top = float(logits.max())
    return top + math.log(np.exp(logits - top).sum(dtype=np.float64))
