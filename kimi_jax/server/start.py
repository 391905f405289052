"""From an opened checkpoint to a server on its engine."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from kimi_jax.decoding.engine import DEFAULT_LIMITS, Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.sampling import Draws, Kind
from kimi_jax.decoding.speculation import PLAIN, Draft
from kimi_jax.generation_defaults import sampling_fields
from kimi_jax.server.app import DEFAULT_HTTP_LIMITS, App, HttpLimits
from kimi_jax.server.loop import EngineLoop
from kimi_jax.server.metrics import Metrics
from kimi_jax.server.service import Service

WarmUp = Literal["none", "usual", "all"]
"""What is compiled before the server is ready: nothing, programs without filters and log-probabilities, or all."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """How an engine is served."""

    model: str
    """Name that clients ask for."""
    slots: int
    """Requests at work at the same time, over the whole mesh."""
    capacity: int | None = None
    """Tokens of prompt and answer that a request may have; None are the model's positions."""
    waiting: int = 1024
    """Requests that may wait for a slot."""
    limits: Limits = DEFAULT_LIMITS
    draft: Draft = PLAIN
    warm_up: WarmUp = "all"
    thinking: bool = True
    most_new_tokens: int | None = None
    """New tokens of a chat's answer where the request does not say; None follows the mode."""
    http: HttpLimits = DEFAULT_HTTP_LIMITS
    api_key: str | None = None
    log_prompts: bool = False


def kinds(warm_up: WarmUp) -> Sequence[Draws]:
    """What programs draw that are compiled before the server is ready."""
    names: dict[WarmUp, tuple[Kind, ...]] = {
        "none": (),
        "usual": ("greedy", "temperature"),
        "all": ("greedy", "temperature", "filters"),
    }
    told = (False, True) if warm_up == "all" else (False,)
    return [Draws(*each) for each in itertools.product(names[warm_up], told)]


def open_queue(engine: Engine, serving: Serving) -> Queue:
    """The engine's slots for a server, with its programs compiled."""
    queue = engine.queue(serving.slots, serving.capacity, serving.limits, serving.draft)
    automatic = engine.automatic(serving.draft, serving.slots, 1, 1)  # made by the line above
    rows = (None,) if automatic is None else tuple(automatic.costs.microseconds)
    queue.session.warm(kinds(serving.warm_up), rows)
    return queue


def app_on(engine: Engine, folder: Path, serving: Serving, log: Callable[[str], None] = lambda line: None) -> App:
    """A server on an engine, whose thread has not begun.

    Args:
      folder: of the checkpoint, which advises how to sample.
    """
    capacity = serving.capacity or engine.config.max_position_embeddings
    service = Service(
        serving.model, engine.tokenizer, engine.stop_ids, engine.known_ids or engine.config.vocab_size, capacity,
        sampling_fields(folder), serving.thinking, serving.most_new_tokens, folder=folder,
        vision=None if engine.vision is None else engine.vision.config,
    )  # fmt: skip
    metrics = Metrics(serving.model)
    loop = EngineLoop(lambda: open_queue(engine, serving), serving.slots + serving.waiting, metrics)
    return App(
        service, loop, metrics,
        limits=serving.http, api_key=serving.api_key, log=log, log_prompts=serving.log_prompts,
    )  # fmt: skip
