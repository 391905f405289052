"""Packed batches of chats: a step's batch is a function of the seed and the step, so resuming needs no data state."""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kimi_jax.chat import render
from kimi_jax.model.rows import Rows, uncached_rows
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.training.tasks import Example, training_stream


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Several chats packed into each sequence; positions restart with each and none sees another."""

    tokens: Int[Array, "sequences length"]
    positions: Int[Array, "sequences length"]
    documents: Int[Array, "sequences length"]
    """Which chat of its sequence a token belongs to, from 1; 0 is padding."""
    predictors: Int[Array, "sequences answers"]
    """Indices of the tokens whose next token is part of an answer; the head runs on these alone."""
    targets: Int[Array, "sequences answers"]
    weights: Float[Array, "sequences answers"]
    """1 where `predictors` and `targets` are filled, else 0."""

    def rows(self) -> Rows:
        """The batch for one forward on an empty cache: each token sees its own chat up to itself."""
        index = jax.numpy.arange(self.tokens.shape[1])
        same = self.documents[:, :, None] == self.documents[:, None, :]
        ancestors = same & (index[:, None] >= index) & (self.documents > 0)[:, :, None]
        return uncached_rows(self.tokens, self.positions, ancestors)


@dataclasses.dataclass(frozen=True)
class Chat:
    """One example as ids, and where the answer starts."""

    ids: list[int]
    answer_start: int
    """Index of the first id that the model has to produce: `</think>`, then the answer, then `<|im_end|>`."""


def encode_chat(tokenizer: Tokenizer, prompt: str, answer_ids: list[int]) -> Chat:
    """A user prompt and the model's answer to it, without thinking, as K2.6's template renders it.

    The model is also taught to close `<think>` itself, so prompts rendered with thinking on work too.
    """
    prompt_ids = render([{"role": "user", "content": prompt}], tokenizer, thinking=False)
    return Chat([*prompt_ids, *answer_ids, tokenizer.special_id("<|im_end|>")], len(prompt_ids) - 1)


def encode_example(tokenizer: Tokenizer, example: Example) -> Chat:
    """An example with its reference answer."""
    return encode_chat(tokenizer, example.prompt, tokenizer.encode(example.answer))


def pack(chats: Iterable[Chat], sequences: int, length: int, answers: int) -> Batch:
    """Fills sequences with whole chats, first fit, until eight chats in a row found no room.

    Args:
      chats: as many as are needed are taken.
      sequences, length: shape of the batch.
      answers: at most so many answer tokens go into one sequence.

    Raises:
      ValueError: a chat does not fit into an empty sequence.
    """
    room = np.full(sequences, length)
    answer_room = np.full(sequences, answers)
    tokens, positions, documents = (np.zeros((sequences, length), np.int32) for _ in range(3))
    predictors, targets = (np.zeros((sequences, answers), np.int32) for _ in range(2))
    weights = np.zeros((sequences, answers), np.float32)
    refused = 0
    for chat in chats:
        # The last id is only ever predicted, so it takes no place in the input.
        size, new = len(chat.ids) - 1, len(chat.ids) - chat.answer_start
        if size > length or new > answers:
            raise ValueError(f"a chat of {size} ids, {new} of them the answer, exceeds sequences of {length}/{answers}")
        fits = np.flatnonzero((room >= size) & (answer_room >= new))
        if not fits.size:
            refused += 1
            if refused == 8:
                break
            continue
        row = fits[0]
        start, first = length - room[row], answers - answer_room[row]
        span, span_answers = slice(start, start + size), slice(first, first + new)
        tokens[row, span] = chat.ids[:-1]
        positions[row, span] = np.arange(size)
        documents[row, span] = documents[row].max() + 1
        predictors[row, span_answers] = start + np.arange(chat.answer_start - 1, size)
        targets[row, span_answers] = chat.ids[chat.answer_start :]
        weights[row, span_answers] = 1
        room[row] -= size
        answer_room[row] -= new
    return Batch(*map(jax.numpy.asarray, (tokens, positions, documents, predictors, targets, weights)))


def training_batch(tokenizer: Tokenizer, seed: int, step: int, *, sequences: int, length: int, answers: int) -> Batch:
    """The batch of one training step."""
    examples = training_stream(np.random.default_rng([seed, step]))
    return pack((encode_example(tokenizer, example) for example in examples), sequences, length, answers)
