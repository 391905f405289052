"""The target's own answers to training prompts: what a drafter has to predict, and so what it is trained on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kimi_jax.chat import render
from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.generate import Request
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.text_files import read_text, write_text
from kimi_jax.training.data import Chat
from kimi_jax.training.tasks import Example, training_stream

MAX_NEW_TOKENS = 64
"""Longer than any right answer; a text that does not end within it is cut there."""


def generate_answers(
    engine: Engine, prompts: Sequence[str], batch: int = 128, progress: Callable[[int], None] | None = None
) -> list[list[int]]:
    """Greedy answers as ids, the stop token included, to user prompts without thinking.

    Args:
      engine: the target.
      prompts: texts of the user's turn.
      batch: prompts decoded together.
      progress: told how many prompts are answered.
    """
    ids = [render([{"role": "user", "content": prompt}], engine.tokenizer, thinking=False) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    requests = [Request(each, Sampling(), 0, MAX_NEW_TOKENS) for each in ids]
    for step in engine.serve(requests, slots=batch):
        for answer, new in zip(answers, step.new_tokens, strict=True):
            answer += new
        if progress:
            progress(sum(step.finished))
    return answers


def answer_text(engine: Engine, ids: Sequence[int]) -> str:
    """An answer's text without its stop token."""
    return engine.tokenizer.decode([token for token in ids if token not in engine.stop_ids])


def as_chat(engine: Engine, prompt: str, answer: Sequence[int]) -> Chat:
    """A prompt with the answer the target gave."""
    prompt_ids = render([{"role": "user", "content": prompt}], engine.tokenizer, thinking=False)
    return Chat([*prompt_ids, *answer], len(prompt_ids) - 1)


def finished_chats(engine: Engine, prompts: Sequence[str], answers: Sequence[Sequence[int]]) -> list[Chat]:
    """Prompts with the answers that ended by themselves; the others have run away and say nothing."""
    pairs = zip(prompts, answers, strict=True)
    return [as_chat(engine, prompt, ids) for prompt, ids in pairs if ids and ids[-1] in engine.stop_ids]


def training_generations(
    engine: Engine, path: Path, texts: int, seed: int, progress: Callable[[int], None] | None = None
) -> list[Chat]:
    """Answers to training prompts, read from `path` where the same prompts have been answered, else generated.

    A run's directory belongs to one target: another one needs another directory.
    """
    stream = training_stream(np.random.default_rng([seed, 1]))
    examples: list[Example] = [next(stream) for _ in range(texts)]
    prompts = [example.prompt for example in examples]
    saved = json.loads(read_text(path)) if path.exists() else {}
    if saved.get("prompts") != prompts:
        saved = {"prompts": prompts, "answers": generate_answers(engine, prompts, progress=progress)}
        write_text(path, json.dumps(saved))
    return finished_chats(engine, prompts, saved["answers"])
