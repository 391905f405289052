"""Images and videos among the parts of a message: where they come from, and what a prompt says in their place."""

import base64
import binascii
import dataclasses
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_jax.vision.images import Limits, Processing, opened
from kimi_jax.vision.media import Medium, MediumError, Shown

if TYPE_CHECKING:
    from PIL import Image

FRAMES = '{"type": "video", "video": [frame, …], "fps": 2}'
SECONDS = 30
"""That an address may take to answer."""


@dataclasses.dataclass
class Album:
    """The media of one prompt, in the order in which its messages are rendered.

    Parts are `{"type": "image_url", "image_url": {"url": …}}`, `{"type": "image", "image": …}` or
    `{"type": "video", "video": [frames …], "fps": …}`. A picture is a data: URL, an address, a path, the bytes of a
    file, or an image of Pillow's.
    """

    processing: Processing
    limits: Limits = dataclasses.field(default_factory=Limits)
    files: bool = True
    """Whether paths are read; not where messages come from others."""
    addresses: bool = False
    """Whether http:// and https:// are fetched."""
    media: list[Medium] = dataclasses.field(default_factory=list)
    _pixels: int = 0

    def look(self, part: Mapping[str, Any], where: str) -> list[Shown]:
        """Takes the media of a part, and says what stands for them.

        Raises:
          MediumError: naming `where`, what is wrong and what to give instead.
        """
        kind = part["type"]
        if kind == "video":
            return self._video(part, where)
        if kind == "video_url":
            raise MediumError(f"{where}: compressed video cannot be decoded here; give its frames as images: {FRAMES}")
        source = part.get(kind)
        if isinstance(source, Mapping):
            source = source.get("url")
        medium = self.processing.image(self._picture(source, where))
        self.media.append(medium)
        return [Shown("", "image", medium.tokens)]

    def _video(self, part: Mapping[str, Any], where: str) -> list[Shown]:
        frames, fps = part.get("video"), part.get("fps", self.processing.sample_fps)
        if not isinstance(frames, list | tuple) or not frames:
            raise MediumError(f"{where}: a video is a list of frames: {FRAMES}")
        if len(frames) > self.limits.frames:
            raise MediumError(f"{where}: has {len(frames):,} frames; a video may have {self.limits.frames:,}")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1e-3 <= fps <= 1e3:
            raise MediumError(f"{where}: fps is {fps!r}; expected frames a second, a number from 0.001 to 1,000")
        pictures = [self._picture(frame, f"{where}.video[{index}]") for index, frame in enumerate(frames)]
        for index, picture in enumerate(pictures):
            if picture.size != pictures[0].size:
                raise MediumError(f"{where}.video[{index}]: is {picture.size}, and the first frame {pictures[0].size}")
        chunks = self.processing.video(pictures, float(fps))
        self.media += [medium for _, medium in chunks]
        return [Shown(_clock(second), "video", medium.tokens) for second, medium in chunks]

    def _picture(self, source: Any, where: str) -> "Image.Image":
        where, data = self._data(source, where)
        picture = opened(data, where, self.limits, self._pixels)
        self._pixels += picture.size[0] * picture.size[1]
        return picture

    def _data(self, source: Any, where: str) -> "tuple[str, bytes | Image.Image]":
        """A picture's file or the picture itself, and what to call it."""
        if isinstance(source, bytes) or hasattr(source, "convert"):  # an image of Pillow's, which is not imported yet
            return where, source
        if not isinstance(source, str | Path) or not str(source):
            raise MediumError(f"{where}: expected an image as a data: URL, an address, a path or bytes")
        text = str(source)
        if isinstance(source, str) and text.startswith("data:"):
            return where, self._of_data_url(text, where)
        if isinstance(source, str) and text.startswith(("http://", "https://")):
            return text, self._fetched(text, where)
        if not self.files:
            raise MediumError(f"{where}: paths are not read here; send the image as a data: URL")
        try:
            with Path(source).open("rb") as file:
                return text, file.read(self.limits.bytes + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise MediumError(f"{text:.200}: cannot be read ({reason})") from None

    def _of_data_url(self, url: str, where: str) -> bytes:
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise MediumError(f"{where}: a data: URL of an image begins like data:image/png;base64,")
        if len(body) > self.limits.bytes * 4 // 3 + 4:
            raise MediumError(f"{where}: is larger than the {self.limits.bytes:,} bytes that an image may have")
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise MediumError(f"{where}: its data: URL is not base64 ({error})") from None

    def _fetched(self, url: str, where: str) -> bytes:
        if not self.addresses:
            raise MediumError(f"{where}: addresses are not fetched unless that is allowed; send a data: URL instead")
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                return answer.read(self.limits.bytes + 1)
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise MediumError(f"{where}: {url:.200} cannot be fetched ({error})") from None


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"
