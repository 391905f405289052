"""Perplexity of texts: every token predicted once from a strided window, weighted equally, resumable."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.scoring import strided
from kimi_jax.parallel import host_arrays, processes
from kimi_jax.text_files import lines_of, naming, read_text, write_text


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and its ids; the first id is context and is not predicted."""

    name: str
    ids: list[int]
    utf8_bytes: int


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """How likely a text is."""

    name: str
    tokens: int
    """Predicted tokens."""
    nats: float
    """Their negative log-likelihood, summed."""
    utf8_bytes: int
    """Of the whole text."""

    @property
    def perplexity(self) -> float:
        """exp of the mean over tokens; infinity where that overflows."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.utf8_bytes

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **dataclasses.asdict(self),
            "perplexity": self.perplexity,
            "nats_per_token": self.nats / self.tokens,
            "bits_per_byte": self.bits_per_byte,
        }


def read_documents(engine: Engine, files: Sequence[Path], *, bos: bool) -> list[Document]:
    """The ids of UTF-8 text files, with `bos` behind [BOS], so that the first token is predicted too.

    Raises:
      ValueError: no file; one that is not UTF-8, or too short to predict anything, by name.
    """
    if not files:
        raise ValueError("no text: give one or more UTF-8 text files")
    documents = []
    for file in files:
        text = read_text(file)
        ids = engine.tokenizer.encode(text)
        ids = [engine.tokenizer.special_id("[BOS]"), *ids] if bos else ids
        if len(ids) < 2:
            raise ValueError(f"{file}: {len(ids)} tokens; there is nothing to predict")
        documents.append(Document(str(file), ids, len(text.encode())))
    return documents


class Journal:
    """Windows already scored, a line each behind a line that says of what; a run that was stopped goes on from it.

    Of several processes the first writes, and all must see the file.
    """

    def __init__(self, path: Path | None, run: dict[str, Any]):
        """Opens or begins the file.

        Raises:
          ValueError: where it belongs to another run, naming what differs.
        """
        self.nats: dict[int, float] = {}
        self._path = path
        self._writes = processes.this().prints
        if path is None:
            return
        text = read_text(path) if path.exists() else ""
        whole, newline, cut = text.rpartition("\n")  # what follows was being written when the run was stopped
        if not text or (not newline and json.dumps(run).startswith(cut)):
            self._write("w", run)
            return
        try:
            first, *rest = map(json.loads, lines_of(whole))
            differ = [name for name in run if first[name] != run[name]]
            self.nats = {entry["window"]: entry["nats"] for entry in rest}
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: not the journal of a perplexity run; give another name") from None
        if differ:
            raise ValueError(f"{path}: belongs to another run (different {', '.join(differ)}); give another name")
        if cut and self._writes:
            write_text(path, whole + newline)

    def add(self, window: int, nats: float) -> None:
        """Keeps one window's result."""
        self.nats[window] = nats
        self._write("a", {"window": window, "nats": nats})

    def _write(self, mode: str, line: dict[str, Any]) -> None:
        if self._path is None or not self._writes:
            return
        with naming(self._path), self._path.open(mode) as stream:
            stream.write(json.dumps(line) + "\n")


def perplexity(
    engine: Engine,
    documents: Sequence[Document],
    *,
    window: int,
    stride: int,
    batch: int,
    journal: Path | None = None,
    checkpoint: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> list[Likelihood]:
    """Likelihood of each document.

    Args:
      engine: the checkpoint on its mesh.
      documents: from `read_documents`.
      window, stride: see `scoring.strided`.
      batch: windows run together, spread over dp and ep.
      journal: file that keeps finished windows; the same call goes on where it was stopped.
      checkpoint: what the journal remembers the checkpoint by (`provenance.fingerprint`).
      progress: told of windows done and windows in all.

    Raises:
      ValueError: as `Engine.score` and `Journal`; a window that exceeds the model's positions.
    """
    positions = engine.config.max_position_embeddings
    if window > positions:
        raise ValueError(f"window is {window}; the model has {positions} positions")
    cut = [
        (number, part) for number, document in enumerate(documents) for part in strided(document.ids, window, stride)
    ]
    texts = hashlib.sha256(json.dumps([document.ids for document in documents]).encode()).hexdigest()
    run = {"checkpoint": checkpoint, "texts": texts, "window": window, "stride": stride, "dtype": str(engine.dtype)}
    done = Journal(journal, run)
    host_arrays.require_agreement("texts, options or finished windows", (run, sorted(done.nats)))
    left = [index for index in range(len(cut)) if index not in done.nats]
    if progress:
        progress(len(done.nats), len(cut))
    limits = Limits(least_capacity=max(len(part.inputs) for _, part in cut))
    scored = engine.score([cut[index][1] for index in left], batch, limits) if left else ()
    for index, result in scored:
        done.add(left[index], -float(result.logprobs.sum(dtype="float64")))
        if progress:
            progress(len(done.nats), len(cut))
    totals = [0.0] * len(documents)
    for index, (number, _) in enumerate(cut):
        totals[number] += done.nats[index]
    return [
        Likelihood(document.name, len(document.ids) - 1, nats, document.utf8_bytes)
        for document, nats in zip(documents, totals, strict=True)
    ]


def together(likelihoods: Sequence[Likelihood]) -> Likelihood:
    """All documents as one, every token counting the same."""
    return Likelihood(
        "all",
        sum(likelihood.tokens for likelihood in likelihoods),
        math.fsum(likelihood.nats for likelihood in likelihoods),
        sum(likelihood.utf8_bytes for likelihood in likelihoods),
    )
