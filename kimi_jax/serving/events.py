"""What a dispatch gave each slot, and what of it belongs to which request."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one dispatch did in one slot."""

    tokens: tuple[int, ...] = ()
    """New tokens of the answer, cut at the limit and after a stop token."""
    finished: bool = False
    """Whether the device will not continue: stop token, limit or failure."""
    failed: int = -1
    """Position whose latents or logits were not finite, or -1."""
    extra: Any = None
    """Whatever else was read of the slot; it travels into the event."""


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request."""

    id: str
    tokens: tuple[int, ...] = ()
    """New tokens of the answer."""
    reason: str | None = None
    """Why the request ended: "stop", "length", "error", or what `cancel` was told; None while it goes on."""
    failed: int = -1
    """After "error", the position that was not finite."""
    slot: int = -1
    """Slot that it comes from, -1 where a request ended in the queue."""
    extra: Any = None
    """`Seen.extra` of the dispatch."""
    reused: int = 0
    """Tokens of the prompt that pages held when it was first admitted."""
