"""Logits of given token ids, for comparing a checkpoint with a reference."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.forcing import force, logits_of
from kimi_jax.text_files import read_text
from kimi_jax.vision.media import Medium


class InputError(ValueError):
    """Ids that cannot be evaluated; the text says what is expected."""


def read_ids(path: Path, vocab_size: int) -> list[list[int]]:
    """A JSON list of id lists of equal length.

    Raises:
      InputError: naming the file and the list that does not fit.
    """
    try:
        value: Any = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, list) or not value or not all(isinstance(ids, list) and ids for ids in value):
        raise InputError(f"{path}: expected a list of non-empty lists of token ids")
    for index, ids in enumerate(value, 1):
        if len(ids) != len(value[0]):
            raise InputError(f"{path}: list {index} has {len(ids)} ids and list 1 has {len(value[0])}; make them equal")
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
        if wrong:
            raise InputError(f"{path}: list {index} holds {wrong[0]!r}, which is no id of 0..{vocab_size - 1}")
    return value


def logits(
    engine: Engine,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
    media: Sequence[Medium] = (),
) -> Float[np.ndarray, "sequences tokens vocab"]:
    """Float32 logits of every position. Sequences have equal lengths; chunks of them run one after the other.

    `media` are the images of each sequence, for the placeholders among its ids. Raises MediumError where they do not
    fit.
    """
    length = len(sequences[0])
    parts = []
    for chunk in force(engine, logits_of, sequences, media=[media] * len(sequences)):
        parts.append(chunk.values[:, : chunk.counts[0]])
        if progress:
            progress(chunk.first + chunk.counts[0], length)
    return np.concatenate(parts, axis=1)
