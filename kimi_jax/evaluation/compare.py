"""Two checkpoints, or one under two settings, on the same ids: how far their predictions and layers are apart.

The two never share memory: the first one's logits and residual streams go to files, the second's are compared with
them as they come. Bytes of the files: tokens × (vocabulary + layers × hidden size) × 4, which is 2.4 MB a token for
K2.6.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.forcing import force, logits_of
from kimi_jax.model.transformer import CausalLM, Output
from kimi_jax.vision.media import Medium

ROWS = 128
"""Rows of a step: bounds what leaves the devices at once."""


def _all_of(
    model: CausalLM, output: Output, targets: Array
) -> tuple[Array, Float[Array, "requests rows layers hidden"]]:
    return logits_of(model, output, targets), jnp.stack(output.taps, axis=2).astype(jnp.float32)


def _rows(
    engine: Engine, sequences: Sequence[Sequence[int]], media: Sequence[Medium], batch: int
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(Sequence, first position, logits [rows, vocab], residual streams [rows, layers, hidden]), float32."""
    layers = tuple(range(engine.config.num_hidden_layers))
    longest = max(map(len, sequences))
    for first in range(0, len(sequences), batch):
        part = sequences[first : first + batch]
        shape: dict[str, Any] = {"requests": batch, "length": longest, "chunk": ROWS, "tap_layers": layers}
        for chunk in force(engine, _all_of, part, media=[media] * len(part), **shape):
            logits, streams = chunk.values
            for row, count in enumerate(chunk.counts):
                if count:
                    yield first + row, chunk.first, logits[row, :count], streams[row, :count]


@dataclasses.dataclass(frozen=True)
class Recording:
    """What one engine computed, in two files."""

    sequences: list[list[int]]
    logits: np.ndarray
    """[tokens of all sequences, vocabulary], float32, on disk."""
    streams: np.ndarray
    """[tokens of all sequences, layers, hidden size], float32, on disk."""
    media: Sequence[Medium] = ()
    """Images of each sequence."""

    def place(self, sequence: int, position: int) -> int:
        """Row of a token."""
        return sum(map(len, self.sequences[:sequence])) + position


def record(
    engine: Engine,
    sequences: Sequence[Sequence[int]],
    directory: Path,
    *,
    batch: int = 1,
    progress: Callable[[int], None] | None = None,
    media: Sequence[Medium] = (),
) -> Recording:
    """Runs the sequences and keeps everything in an existing, empty folder.

    `progress` is told of tokens as they are done, by numbers of them. `media` are the images of each sequence, for the
    placeholders among its ids.

    Raises:
      MediumError: images that do not fit the placeholders.
      ValueError: the disk has no room; sequences that the model cannot take.
    """
    config, tokens = engine.config, sum(map(len, sequences))
    shapes = {"logits": (tokens, config.vocab_size), "streams": (tokens, config.num_hidden_layers, config.hidden_size)}
    needed, free = 4 * sum(map(math.prod, shapes.values())), shutil.disk_usage(directory).free
    if needed > free:
        raise ValueError(
            f"{directory}: {needed / 1e9:.1f} GB needed for {tokens} tokens and {free / 1e9:.1f} GB free: "
            "take fewer tokens (--tokens) or another folder (--scratch)"
        )
    files = {
        name: np.lib.format.open_memmap(directory / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape)
        for name, shape in shapes.items()
    }
    recording = Recording([list(ids) for ids in sequences], files["logits"], files["streams"], media)
    for sequence, position, logits, streams in _rows(engine, sequences, media, batch):
        place = recording.place(sequence, position)
        recording.logits[place : place + len(logits)] = logits
        recording.streams[place : place + len(logits)] = streams
        if progress:
            progress(len(logits))
    return recording


@dataclasses.dataclass
class LayerDifference:
    """Residual streams behind one layer: ‖second - first‖ / ‖first‖ of each token."""

    mean: float = 0.0
    largest: float = 0.0
    sequence: int = 0
    position: int = 0
    """Of the token with the largest difference."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far the second is from the first; every token counts the same."""

    tokens: int
    kl_mean: float
    """Of the next token's distributions, Σ p ln(p/q) with p the first's, in nats."""
    kl_largest: float
    top1_agreement: float
    """Share of tokens behind which both have the same most likely token."""
    largest_logit_difference: float
    layers: list[LayerDifference]
    tolerance: float

    @property
    def first_layer(self) -> int | None:
        """First layer behind which some token differs by more than the tolerance; None where none does."""
        return next((n for n, layer in enumerate(self.layers) if layer.largest > self.tolerance), None)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return dataclasses.asdict(self) | {"first_layer": self.first_layer}


def compare(
    engine: Engine, first: Recording, *, tolerance: float, batch: int = 1, progress: Callable[[int], None] | None = None
) -> Comparison:
    """Runs the recording's sequences and compares.

    `tolerance` is for the layers' differences and decides nothing but `Comparison.first_layer`.

    Raises:
      ValueError: the models have different vocabularies, layers or hidden sizes.
    """
    config = engine.config
    ours = {
        "vocab_size": (first.logits.shape[1], config.vocab_size),
        "num_hidden_layers": (first.streams.shape[1], config.num_hidden_layers),
        "hidden_size": (first.streams.shape[2], config.hidden_size),
    }
    if different := [f"{name} {a} and {b}" for name, (a, b) in ours.items() if a != b]:
        raise ValueError(f"the checkpoints cannot be compared: they have {', '.join(different)}")
    layers = [LayerDifference() for _ in range(config.num_hidden_layers)]
    tokens = agree = 0
    divergence = most_divergent = largest = 0.0
    for sequence, position, logits, streams in _rows(engine, first.sequences, first.media, batch):
        count = len(logits)
        rows = slice(first.place(sequence, position), first.place(sequence, position) + count)
        p, q = _log_softmax(first.logits[rows]), _log_softmax(logits)
        kl = (np.exp(p) * (p - q)).sum(-1)
        divergence += float(kl.sum())
        most_divergent = max(most_divergent, float(kl.max()))
        agree += int((first.logits[rows].argmax(-1) == logits.argmax(-1)).sum())
        largest = max(largest, float(np.abs(first.logits[rows] - logits).max()))
        theirs = first.streams[rows]
        relative = np.linalg.norm(streams - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
        for layer, values in zip(layers, relative.T, strict=True):
            layer.mean += float(values.sum())
            if values.max() > layer.largest:
                layer.largest = float(values.max())
                layer.sequence, layer.position = sequence, position + int(values.argmax())
        tokens += count
        if progress:
            progress(count)
    for layer in layers:
        layer.mean /= tokens
    return Comparison(tokens, divergence / tokens, most_divergent, agree / tokens, largest, layers, tolerance)


def _log_softmax(logits: Float[np.ndarray, "rows vocab"]) -> Float[np.ndarray, "rows vocab"]:
    values = logits.astype(np.float64)
    values -= values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))
