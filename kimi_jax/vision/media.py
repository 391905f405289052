"""A picture or a chunk of a video as the tower takes it, and the places it has in a prompt. Nothing here needs jax."""

import base64
import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

TOKENS_PER = 4
"""Patches of a frame that become one token."""
MOST_PATCHES = 18_432
"""Patches of a medium at most: limits hold before padding, so a grid may exceed K2.6's 16,384 somewhat."""
FIRST_ID, LAST_ID = 2**24, 2**31 - 1
"""Range of the numbers that stand for content: beyond any vocabulary, and within int32."""
NO_TOWER = "the checkpoint has no vision tower and sees no images: open one that has, or describe them in text"


class MediumError(ValueError):
    """A picture or video that cannot be shown to the model; the text says which, why, and what to do instead."""


@dataclasses.dataclass(frozen=True, eq=False)
class Medium:
    """One image, or up to four frames of a video that are seen together."""

    patches: UInt8[np.ndarray, "patches pixels"]
    """Frame by frame and row by row; of each patch the red pixels, then the green, then the blue."""
    grid: tuple[int, int, int]
    """Frames, rows of patches, patches of a row."""

    def __post_init__(self) -> None:
        frames, rows, columns = self.grid
        if frames * rows * columns != len(self.patches) or rows % 2 or columns % 2 or not len(self.patches):
            raise MediumError(f"a medium of {len(self.patches)} patches cannot have the grid {self.grid}")
        if len(self.patches) > MOST_PATCHES:
            raise MediumError(f"a medium has {len(self.patches):,} patches; at most {MOST_PATCHES:,} are possible")

    @property
    def tokens(self) -> int:
        """Places it takes in a prompt, whatever the number of frames."""
        return self.grid[1] * self.grid[2] // TOKENS_PER

    @functools.cached_property
    def digest(self) -> bytes:
        """Of its content: equal media have equal ones."""
        return hashlib.sha256(repr(self.grid).encode() + self.patches.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Medium) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Medium({self.grid}, {self.digest.hex()[:16]})"

    def ids(self) -> list[int]:
        """One number for each of its places, from its content and beyond the vocabulary.

        They stand where the placeholders were, so that whatever compares prompts (kept pages, journals) sees pictures.
        """
        numbers = np.frombuffer(hashlib.shake_256(self.digest).digest(4 * self.tokens), np.uint32)
        return (FIRST_ID + numbers.astype(np.int64) % (LAST_ID - FIRST_ID)).tolist()

    def to_json(self) -> dict[str, Any]:
        """As JSON carries it, a third larger than its bytes."""
        return {"grid": self.grid, "patches": base64.b85encode(self.patches).decode()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Medium":
        """What `to_json` gave."""
        grid, patches = fields["grid"], np.frombuffer(base64.b85decode(fields["patches"]), np.uint8)
        return cls(patches.reshape(math.prod(grid), -1), (grid[0], grid[1], grid[2]))


@dataclasses.dataclass(frozen=True)
class Placed:
    """A medium in a prompt."""

    first: int
    """Position of its first place."""
    medium: Medium


@dataclasses.dataclass(frozen=True)
class Shown:
    """What stands in a prompt for a medium."""

    before: str
    """Text before it: a chunk's time, and nothing before an image."""
    kind: str
    """`image` or `video`."""
    tokens: int


def spans(ids: Sequence[int], media: Sequence[Medium], placeholder: int) -> list[range]:
    """The places of each medium in a prompt, which has so many placeholders in a row for each, in order.

    Raises:
      MediumError: placeholders that are more, fewer or otherwise than the media need.
    """
    places = [index for index, token in enumerate(ids) if token == placeholder]
    needed = sum(medium.tokens for medium in media)
    if len(places) != needed:
        raise MediumError(
            f"the prompt has {len(places):,} placeholders ({placeholder}) and its {len(media)} images and chunks of "
            f"video need {needed:,}"
        )
    found, first = [], 0
    for number, medium in enumerate(media, 1):
        start = places[first]
        if places[first : first + medium.tokens] != list(range(start, start + medium.tokens)):
            raise MediumError(f"the {medium.tokens:,} placeholders of medium {number} do not stand side by side")
        found.append(range(start, start + medium.tokens))
        first += medium.tokens
    return found


def with_content(ids: Sequence[int], media: Sequence[Medium], placeholder: int) -> tuple[list[int], tuple[Placed, ...]]:
    """A prompt with numbers of the media's content instead of placeholders (see `Medium.ids`), and where they are.

    Raises as `spans`.
    """
    result, found = list(ids), spans(ids, media, placeholder)
    for medium, span in zip(media, found, strict=True):
        result[span.start : span.stop] = medium.ids()
    return result, tuple(Placed(span.start, medium) for medium, span in zip(media, found, strict=True))


def buckets() -> Iterator[int]:
    """Numbers of patches that programs are compiled for, ascending: whole blocks of 256, at most half as many more than
    the one before from 512 on."""
    yield 256
    size = 512
    while size < MOST_PATCHES:
        yield size
        if size + size // 2 < MOST_PATCHES:
            yield size + size // 2
        size *= 2
    yield MOST_PATCHES


def bucket(patches: int) -> int:
    """The smallest number that programs are compiled for and so many patches fit."""
    return next(size for size in buckets() if size >= patches)
