"""The public models whose configurations come with the package."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from kimi_jax.config import SIZES, TEXT_MODEL_TYPES, ModelConfig
from kimi_jax.config_fields import ConfigError, Fields, as_object, read_config
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


def shapes_of(path: Path) -> ModelConfig:
    """The sizes of any checkpoint of the family, also of one that the program does not run, to be counted.

    K2, K2.5, K2.6, K2.7-Code, DeepSeek-V3 and R1 are such; how they are quantised, and groups of experts, do not count.

    Args:
      path: its folder or config.json.

    Raises:
      ConfigError: another kind of model, or a size that is missing.
    """

    def sizes_of(raw: Mapping[str, Any]) -> ModelConfig:
        text = Fields(as_object(raw, "the file"))
        if "text_config" in text.values:
            text = Fields(as_object(text.values["text_config"], "text_config"), "text_config.")
        if text.values.get("model_type") not in TEXT_MODEL_TYPES:
            return ModelConfig.from_dict(raw)  # which says what it is
        return dataclasses.replace(k26(), **{name: text.integer(name, *limits) for name, limits in SIZES.items()})

    try:
        return ModelConfig.from_json(path)
    except ConfigError:
        return read_config(path, "a checkpoint directory", sizes_of)


@functools.cache
def kimi_drafter() -> DrafterConfig:
    """The public Kimi drafters (z-lab/Kimi-K2.5-DFlash and Kimi-K2.6-DFlash share their shape; 3.48 B weights).

    The values of their config.json as users of the gated repository quote them (tt-metal, vllm-ascend); the parameter
    count they give is the size of the published file.
    """
    return DrafterConfig.from_dict(asset("kimi_drafter_config.json"))
