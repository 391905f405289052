"""The public models whose configurations come with the package."""

import functools
import json
from importlib import resources
from typing import Any

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.vision.config import VisionConfig


def asset(name: str) -> Any:
    """A JSON file that comes with the package."""
    return json.loads(resources.files("kimi_jax").joinpath("assets", name).read_text())


@functools.cache
def k26() -> ModelConfig:
    """The configuration of moonshotai/Kimi-K2.6, from the packaged copy of its config.json."""
    return ModelConfig.from_dict(asset("k26_config.json"))


@functools.cache
def k26_vision() -> VisionConfig:
    """The configuration of K2.6's vision tower, from the same file."""
    config = VisionConfig.from_dict(asset("k26_config.json"))
    assert config is not None
    return config


@functools.cache
def kimi_drafter() -> DrafterConfig:
    """The public Kimi drafters (z-lab/Kimi-K2.5-DFlash and Kimi-K2.6-DFlash share their shape; 3.48 B weights).

    The values of their config.json as users of the gated repository quote them (tt-metal, vllm-ascend); the parameter
    count they give is the size of the published file.
    """
    return DrafterConfig.from_dict(asset("kimi_drafter_config.json"))
