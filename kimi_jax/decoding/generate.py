"""The host's part of decoding: batches of prompts in, tokens out between dispatches."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import numpy as np
from jaxtyping import Array, UInt32

from kimi_jax.decoding.automatic import AutomaticBudget
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.rebalance import Rebalancer
from kimi_jax.decoding.sampling import request_keys
from kimi_jax.decoding.state import FINE, DecodeState, Snapshot
from kimi_jax.parallel import host_arrays
from kimi_jax.parallel.sharding import REQUESTS
from kimi_jax.parameters import Parameters

SMALLEST_CHUNK = 16


class NonFiniteLogitsError(RuntimeError):
    """The target's logits held NaN or infinity: broken weights or a broken kernel, never a token."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one dispatch brought."""

    new_tokens: list[list[int]]
    """For each prompt its new ones, in order; the last one of a text may be a stop token."""
    finished: list[bool]
    seconds: float
    """Since generation started."""
    snapshot: Snapshot
    """Everything the device reported, as NumPy arrays over all prompts."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Shapes and batch sizes of a generation that a user may set."""

    max_new_tokens: int = 128
    prefill_chunk: int = 512
    """Prompt tokens a prefill step runs for each request."""
    rounds_per_dispatch: int = 8
    """Rounds the device runs before the host looks; the first dispatch runs one, so that text starts early."""
    least_capacity: int = 1
    """Cached positions to provide for each request at least: batches that give the same share compiled programs."""
    each: tuple[int, ...] | None = None
    """New tokens of each prompt at most, where they differ; none exceeds max_new_tokens."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and np.min(value) < 1:
                raise ValueError(f"{field.name} is {value}; it must be positive")
        if self.each is not None and max(self.each) > self.max_new_tokens:
            raise ValueError(f"a prompt may have {max(self.each)} new tokens and all at most {self.max_new_tokens}")

    def of_each(self, prompts: int) -> list[int]:
        """New tokens of each of so many prompts at most. Raises ValueError where `each` has another number of them."""
        return one_each("limits", self.max_new_tokens if self.each is None else self.each, prompts)


def generate(
    programs: Programs,
    parameters: Parameters,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    seed: int | Sequence[int] = 0,
    rebalancer: Rebalancer | None = None,
    samples: Sequence[int] | None = None,
    automatic: AutomaticBudget | None = None,
) -> Iterator[Progress]:
    """Decodes a batch of prompts of any lengths, yielding after every dispatch. A stop token is the last of its text.

    A rebalancer moves experts between dispatches, in the arrays that `parameters` holds.

    Args:
      prompts: token ids, as lists or integer arrays.
      seed: of all prompts, or one for each. What is sampled for a prompt depends on its own seed and sample number.
      samples: number of each prompt among those that share its seed; 0 by default, so equal prompts with equal seeds
        get equal texts.
      automatic: picks the rows that each dispatch verifies; without it they are those of the programs.

    Raises:
      ValueError: an empty prompt, ids that are no integers or outside the vocabulary, more positions than the model
        has, or a seed that does not fit 64 bits.
      NonFiniteLogitsError: naming the prompt and the position.
    """
    started = time.perf_counter()
    parameters = {name: parameters[name] for name in programs.needs}
    state = prefill(programs, parameters, prompts, limits, seed, samples)
    seen, wanted, done = [0] * len(prompts), 1, False
    snapshot = None
    if rebalancer is not None:
        rebalancer.begin()
    while not done:
        state, snapshot = dispatch(programs, parameters, state, wanted, automatic, snapshot)
        snapshot = jax.tree.map(lambda x: x[: len(prompts)] if x.ndim else x, snapshot)
        _raise_if_failed(snapshot)
        ends = snapshot.counts.tolist()
        new = [snapshot.emitted[row, seen[row] : end].tolist() for row, end in enumerate(ends)]
        finished = snapshot.finished.tolist()
        seen, wanted, done = ends, limits.rounds_per_dispatch, all(finished)
        yield Progress(new, finished, time.perf_counter() - started, snapshot)
        if rebalancer is not None and not done:
            longest = int(snapshot.rounds.max())
            state = rebalancer.after(longest, parameters, state)
            wanted = min(wanted, rebalancer.rounds_left(longest))


def dispatch(
    programs: Programs, parameters: Parameters, state: DecodeState, rounds: int,
    automatic: AutomaticBudget | None, before: Snapshot | None,
) -> tuple[DecodeState, Snapshot]:  # fmt: skip
    """Runs up to so many rounds and reads what came, as NumPy arrays.

    With an automatic budget they have the rows it picks, and it learns from what came since `before`, the snapshot of
    the dispatch before this one.
    """
    if automatic is None:
        state, snapshot = programs.decode(parameters, state, np.int32(rounds))
        return state, jax.tree.map(np.asarray, snapshot)
    rows, rounds = automatic.next(rounds)
    state, snapshot = programs.with_rows(rows).decode(parameters, state, np.int32(rounds))
    snapshot = jax.tree.map(np.asarray, snapshot)
    ended = np.zeros(2, int) if before is None else _rounds_and_tokens(before)
    automatic.observe(rows, *(_rounds_and_tokens(snapshot) - ended).tolist())
    return state, snapshot


def _rounds_and_tokens(snapshot: Snapshot) -> np.ndarray:
    """Rounds run so far and tokens that they emitted, over all requests."""
    return np.array([snapshot.rounds.sum(), snapshot.round_tokens.sum()])


def prefill(
    programs: Programs,
    parameters: Parameters,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    seed: int | Sequence[int] = 0,
    samples: Sequence[int] | None = None,
) -> DecodeState:
    """The state after all prompts have been run: their first tokens are drawn, none is emitted.

    Raises ValueError as `generate` does.
    """
    config = programs.model.config
    prompts = token_rows(prompts)
    most = limits.of_each(len(prompts))
    check_prompts(prompts, config.vocab_size, config.max_position_embeddings, most)
    multiple = programs.request_multiple
    requests = -(-len(prompts) // multiple) * multiple
    longest = max(map(len, prompts))
    chunk = chunk_rows(longest, limits)
    empty = requests - len(prompts)
    padded = [*prompts, *[[] for _ in range(empty)]]
    seeds, numbers = (
        one_each("seeds", seed, len(prompts)),
        one_each("samples", 0 if samples is None else samples, len(prompts)),
    )

    def place(values: np.ndarray) -> Array:
        return host_arrays.place(values, programs.mesh, REQUESTS)

    keys = request_keys([*seeds, *[0] * empty], [*numbers, *[0] * empty])
    state = start(programs, keys, [*most, *[0] * empty], longest, limits)
    for first in range(0, longest, chunk):
        tokens = np.zeros((requests, chunk), np.int32)
        counts = np.zeros(requests, np.int32)
        for row, prompt in enumerate(padded):
            part = prompt[first : first + chunk]
            tokens[row, : len(part)] = part
            counts[row] = len(part)
        state = programs.prefill(parameters, state, place(tokens), place(counts))

    return state


def start(
    programs: Programs, keys: UInt32[np.ndarray, "requests 2"], budgets: Sequence[int], longest: int, limits: Limits
) -> DecodeState:
    """The state before anything has run, for prompts of at most `longest` tokens; `budgets` limits their new ones."""
    steps = programs.speculation.max_depth + 1
    capacity = _round_up(max(longest + limits.max_new_tokens + steps, limits.least_capacity), programs.cache_multiple)
    placed = (host_arrays.place(x, programs.mesh, REQUESTS) for x in (keys, np.asarray(budgets, np.int32)))
    return programs.start(*placed, capacity=capacity, max_new_tokens=limits.max_new_tokens)


def token_rows(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts as lists of ints. Raises ValueError naming the prompt whose ids are no integers."""
    rows = []
    for index, prompt in enumerate(prompts, 1):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"prompt {index} is {prompt!r:.60}; it must be a row of integer ids")
        rows.append(ids.tolist())
    return rows


def one_each(what: str, value: int | Sequence[int], prompts: int) -> list[int]:
    """A value for each prompt, where one may be given for all. Raises ValueError where their numbers differ."""
    values = list(cast(Sequence[int], value)) if np.ndim(value) else [cast(int, value)] * prompts
    if len(values) != prompts:
        raise ValueError(f"there are {len(values)} {what} for {prompts} prompts")
    return values


def check_prompts(
    prompts: Sequence[Sequence[int]], vocab_size: int, positions: int, max_new_tokens: Sequence[int]
) -> None:
    """Refuses what would index outside the embedding or the positions. Raises ValueError naming the prompt."""
    if not prompts:
        raise ValueError("there is no prompt")
    for index, (prompt, most) in enumerate(zip(prompts, max_new_tokens, strict=True), 1):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if max(prompt) >= vocab_size or min(prompt) < 0:
            raise ValueError(f"prompt {index} has an id outside 0..{vocab_size - 1}; does the tokenizer fit the model?")
        if len(prompt) + most > positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {most} new ones it exceeds the model's "
                f"{positions} positions"
            )


def _raise_if_failed(snapshot: Snapshot) -> None:
    failed = np.flatnonzero(snapshot.failed != FINE)
    if failed.size:
        prompt = int(failed[0])
        raise NonFiniteLogitsError(
            f"prompt {prompt + 1}: the logits behind position {int(snapshot.failed[prompt])} are not finite; "
            "check the checkpoint (scripts/evaluate.py logits) and the kernels in use"
        )


def chunk_rows(longest: int, limits: Limits) -> int:
    """Rows of each request in a prefill step, for prompts of at most `longest` tokens: a power of two, or the limit."""
    return min(limits.prefill_chunk, max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
