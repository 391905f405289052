"""What transformers sees in the media of the fixture, and the bundled checkpoint's tower with its weights."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from kimi_jax.vision.media import Medium

DATA = Path(__file__).parents[1] / "data"


@dataclasses.dataclass(frozen=True)
class Seen:
    """Media, and the reference's rows for each."""

    media: list[Medium]
    rows: list[np.ndarray]


def cut(patches: np.ndarray, grids: np.ndarray) -> list[Medium]:
    """Media whose patches lie one behind the other."""
    ends = np.cumsum(grids.prod(1))[:-1]
    return [Medium(part, tuple(grid.tolist())) for part, grid in zip(np.split(patches, ends), grids, strict=True)]


@pytest.fixture(scope="session")
def vision_reference() -> dict[str, np.ndarray]:
    return load_file(DATA / "vision_reference.safetensors")


@pytest.fixture(scope="session")
def seen(vision_reference) -> Seen:
    media = cut(vision_reference["patches"], vision_reference["grids"])
    return Seen(media, [vision_reference[f"rows.{index}"] for index in range(len(media))])


@pytest.fixture(scope="session")
def prompt_media(vision_reference) -> list[Medium]:
    return cut(vision_reference["prompt_patches"], vision_reference["prompt_grids"])
