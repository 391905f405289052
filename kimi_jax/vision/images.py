"""Pictures to patches, as the checkpoint's own preprocessing does it: Pillow decodes and resizes, the rest is NumPy."""

import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from kimi_jax.config_fields import Fields, as_object, read_config
from kimi_jax.vision.media import Medium, MediumError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is decoded; Pillow knows many more, which nobody needs and few look after."""
WIDE_MODES = ("I", "F")
"""Beginnings of Pillow's modes with more than 8 bits a channel, which would be cut off and not scaled."""
PROCESSOR_NAME = "preprocessor_config.json"
MERGED = 2
"""Patches along a token's side."""
IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "merge_kernel_size": (2, [2, 2]), "image_mean": ([0.5, 0.5, 0.5],), "image_std": ([0.5, 0.5, 0.5],),
    "fixed_output_tokens": (), "in_patch_limit_video": (), "max_num_frames_each_video": (),
    "timestamp_mode": ("hh:mm:ss.fff",),
}  # fmt: skip
"""Fields that choose how something is done, with the choices there are."""


@dataclasses.dataclass(frozen=True)
class Processing:
    """How large a picture may be for the tower; K2.6's numbers where a checkpoint has no preprocessor_config.json."""

    patch_size: int = 14
    """Pixels of a patch's side."""
    in_patch_limit: int = 16_384
    """Patches of an image, before padding; larger ones are made smaller."""
    in_patch_limit_each_frame: int = 4096
    """Patches of a frame of a video."""
    patch_limit_on_one_side: int = 512
    sample_fps: float = 2.0
    """Frames of a second of video that are looked at, at most."""
    temporal_merge_kernel_size: int = 4
    """Frames that are seen together."""

    @classmethod
    def from_json(cls, directory: str | Path) -> "Processing":
        """Reads a checkpoint's preprocessor_config.json, where it has one.

        Raises:
          ConfigError: naming the file and the field that is not supported.
        """
        path = Path(directory) / PROCESSOR_NAME
        return read_config(path, "a checkpoint directory", cls.from_dict) if path.exists() else cls()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "Processing":
        """Builds it from the parsed file.

        Raises:
          ConfigError: as `from_json` does.
        """
        fields = Fields(as_object(raw, "the file")).object("media_proc_cfg")
        fields.require(IMPLEMENTED)
        usual = cls()
        return cls(
            patch_size=fields.integer("patch_size", 1, 1024, usual.patch_size),
            in_patch_limit=fields.integer("in_patch_limit", 4, 16_384, usual.in_patch_limit),
            in_patch_limit_each_frame=fields.integer(
                "in_patch_limit_each_frame", 4, 4096, usual.in_patch_limit_each_frame
            ),
            patch_limit_on_one_side=fields.integer("patch_limit_on_one_side", 2, 512, usual.patch_limit_on_one_side),
            sample_fps=fields.number("sample_fps", 1e-3, 1e3, usual.sample_fps),
            temporal_merge_kernel_size=fields.integer("temporal_merge_kernel_size", 1, 4, 4),
        )

    def resized(self, width: int, height: int, limit: int) -> tuple[int, int]:
        """Width and height in pixels of a picture once it fits; it never grows."""
        side = self.patch_limit_on_one_side * self.patch_size
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        scale = min(1.0, math.sqrt(limit / patches), side / width, side / height)
        return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)

    def padded(self, width: int, height: int) -> tuple[int, int]:
        """The same with whole tokens on both sides."""
        token = self.patch_size * MERGED
        return -(-width // token) * token, -(-height // token) * token

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """Frames, rows and columns of an image of so many pixels."""
        across, down = self.padded(*self.resized(width, height, self.in_patch_limit))
        return 1, down // self.patch_size, across // self.patch_size

    def image(self, picture: "Image.Image") -> Medium:
        """An image of RGB pixels as the tower takes it."""
        return self._medium([picture], self.in_patch_limit)

    def video(self, frames: "Sequence[Image.Image]", fps: float) -> list[tuple[float, Medium]]:
        """A video of RGB frames as chunks that are seen together, each with the second at which it begins.

        Args:
          frames: all of one size.
          fps: frames a second.
        """
        count = max(round(len(frames) * min(self.sample_fps, fps) / fps), 1)
        kept = np.linspace(0, len(frames) - 1, count).round().astype(int).tolist()
        step = self.temporal_merge_kernel_size
        chunks = [kept[first : first + step] for first in range(0, len(kept), step)]
        return [
            (chunk[0] / fps, self._medium([frames[index] for index in chunk], self.in_patch_limit_each_frame))
            for chunk in chunks
        ]

    def _medium(self, frames: "Sequence[Image.Image]", limit: int) -> Medium:
        from PIL import Image

        width, height = self.resized(*frames[0].size, limit)
        across, down = self.padded(width, height)
        pixels = np.zeros((len(frames), down, across, 3), np.uint8)
        for place, frame in zip(pixels, frames, strict=True):
            smaller = frame.resize((width, height), Image.Resampling.BICUBIC)
            place[:height, :width] = np.asarray(smaller)
        return Medium(*_patches(pixels, self.patch_size))


def _patches(
    pixels: UInt8[np.ndarray, "frames height width 3"], size: int
) -> tuple[UInt8[np.ndarray, "patches pixels"], tuple[int, int, int]]:
    frames, height, width, _ = pixels.shape
    rows, columns = height // size, width // size
    cut = pixels.reshape(frames, rows, size, columns, size, 3).transpose(0, 1, 3, 5, 2, 4)
    return np.ascontiguousarray(cut).reshape(frames * rows * columns, -1), (frames, rows, columns)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is decoded at most: pictures come from strangers."""

    bytes: int = 32 << 20
    """Of one file."""
    pixels: int = 80_000_000
    """Of one picture, before it is made smaller."""
    frames: int = 512
    """Of one video."""
    pixels_of_prompt: int = 400_000_000
    """Of all pictures of a prompt together: few bytes can hold many pixels."""


def opened(source: "bytes | Image.Image", where: str, limits: Limits, before: int = 0) -> "Image.Image":
    """A picture's RGB pixels as they are stored: transparency is dropped and no EXIF rotation is applied, as the
    checkpoint's own preprocessing has it. The prompt's pictures had `before` pixels so far.

    Raises:
      MediumError: naming `where`; no picture, a damaged one, one that is too large, has several frames or more than 8
        bits a channel.
    """
    from PIL import Image

    if isinstance(source, bytes) and len(source) > limits.bytes:
        raise MediumError(f"{where}: has {len(source):,} bytes; an image may have {limits.bytes:,}")
    try:
        image = Image.open(io.BytesIO(source), formats=FORMATS) if isinstance(source, bytes) else source
        width, height = image.size
        if width * height > limits.pixels or not width * height:
            raise MediumError(f"{where}: is {width} × {height}; an image has 1 to {limits.pixels:,} pixels")
        if before + width * height > limits.pixels_of_prompt:
            raise MediumError(f"{where}: the images of a prompt may have {limits.pixels_of_prompt:,} pixels together")
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":  # a JPEG with its preview
            raise MediumError(f"{where}: has {frames} frames; give one of them, or all as the list of a video's frames")
        if image.mode.startswith(WIDE_MODES):
            raise MediumError(f"{where}: has more than 8 bits a channel (mode {image.mode}); save it with 8")
        return image.convert("RGB")
    except MediumError:
        raise
    except Image.UnidentifiedImageError:
        raise MediumError(f"{where}: is no image of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise MediumError(f"{where}: is larger than any image that is decoded here; make it smaller") from None
    except Exception as error:  # Pillow's decoders raise whatever damaged bytes lead them to
        raise MediumError(f"{where}: cannot be decoded ({error}); is the file whole?") from None
