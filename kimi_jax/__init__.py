"""Kimi K2.6 on NVIDIA GPUs from JAX: INT4 experts, MLA, DDTree speculative decoding, on any mesh.

With the bundled checkpoint, on one device:

    import kimi_jax

    engine = kimi_jax.load()
    print(engine.chat("Add 612 and 259.", thinking=False).text)
    for piece in engine.stream("Tell a story about a fox named Mila, a forest and a coin.", thinking=False):
        print(piece.text, end="")
    logits = engine.logits(engine.tokenizer.encode("Add 612 and 259."))

`load("DIR or hub name", mesh="nvl72", drafter="DIR")` opens any other; `Engine.generate` decodes batches of token ids.

Names are imported when they are first used, so that a program may choose devices before jax starts.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax.chat import render
    from kimi_jax.config import ModelConfig
    from kimi_jax.decoding.conversation import Answer
    from kimi_jax.decoding.engine import Draft, Engine
    from kimi_jax.decoding.generate import Limits, Progress
    from kimi_jax.decoding.loading import open_checkpoint
    from kimi_jax.decoding.sampling import Sampling
    from kimi_jax.opening import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER, load
    from kimi_jax.tokenizer import Tokenizer

_HOMES = {
    "BUNDLED_CHECKPOINT": "kimi_jax.opening",
    "BUNDLED_DRAFTER": "kimi_jax.opening",
    "Answer": "kimi_jax.decoding.conversation",
    "Draft": "kimi_jax.decoding.engine",
    "Engine": "kimi_jax.decoding.engine",
    "Limits": "kimi_jax.decoding.generate",
    "ModelConfig": "kimi_jax.config",
    "Progress": "kimi_jax.decoding.generate",
    "Sampling": "kimi_jax.decoding.sampling",
    "Tokenizer": "kimi_jax.tokenizer",
    "load": "kimi_jax.opening",
    "open_checkpoint": "kimi_jax.decoding.loading",
    "render": "kimi_jax.chat",
}

__all__ = [
    "BUNDLED_CHECKPOINT",
    "BUNDLED_DRAFTER",
    "Answer",
    "Draft",
    "Engine",
    "Limits",
    "ModelConfig",
    "Progress",
    "Sampling",
    "Tokenizer",
    "load",
    "open_checkpoint",
    "render",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names alone: what the module uses itself is nobody's business."""
    return sorted(__all__)
