"""Kimi K2.6 on NVIDIA GPUs from JAX: INT4 experts, MLA, DDTree speculative decoding, on any mesh.

Example, on one device with the bundled checkpoint:

    from kimi_jax import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER, Draft, Limits, Sampling, open_checkpoint, render
    from meshes import build_mesh, preset, select_devices

    machine = preset("local")
    mesh = build_mesh(machine, select_devices(machine).devices)
    engine = open_checkpoint(BUNDLED_CHECKPOINT, mesh, machine.layout, "float32", BUNDLED_DRAFTER)
    prompt = render([{"role": "user", "content": "Add 612 and 259."}], engine.tokenizer, thinking=False)
    text = []
    for step in engine.generate([prompt], Limits(max_new_tokens=64), Sampling(), draft=Draft("ddtree", budget=16)):
        text += step.new_tokens[0]
    print(engine.tokenizer.decode(text))

Names are imported when they are first used, so that a program may choose devices before jax starts.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax.chat import render
    from kimi_jax.cli import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER
    from kimi_jax.config import ModelConfig
    from kimi_jax.decoding.engine import Draft, Engine, open_checkpoint
    from kimi_jax.decoding.generate import Limits, Progress
    from kimi_jax.decoding.sampling import Sampling
    from kimi_jax.tokenizer import Tokenizer

_HOMES = {
    "BUNDLED_CHECKPOINT": "kimi_jax.cli",
    "BUNDLED_DRAFTER": "kimi_jax.cli",
    "Draft": "kimi_jax.decoding.engine",
    "Engine": "kimi_jax.decoding.engine",
    "Limits": "kimi_jax.decoding.generate",
    "ModelConfig": "kimi_jax.config",
    "Progress": "kimi_jax.decoding.generate",
    "Sampling": "kimi_jax.decoding.sampling",
    "Tokenizer": "kimi_jax.tokenizer",
    "open_checkpoint": "kimi_jax.decoding.engine",
    "render": "kimi_jax.chat",
}

__all__ = [
    "BUNDLED_CHECKPOINT",
    "BUNDLED_DRAFTER",
    "Draft",
    "Engine",
    "Limits",
    "ModelConfig",
    "Progress",
    "Sampling",
    "Tokenizer",
    "open_checkpoint",
    "render",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
