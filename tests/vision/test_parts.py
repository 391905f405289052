"""Images and videos among the parts of messages: what a prompt says in their place, and where they may come from."""

import base64
import http.server
import io
import threading

import numpy as np
import pytest
from PIL import Image

from kimi_jax.chat import MessageError, render
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.vision.images import Limits, Processing
from kimi_jax.vision.media import MediumError
from kimi_jax.vision.parts import Album

CHECKPOINT = "tests/data/tiny_random"


@pytest.fixture(scope="module")
def tokenizer(request):
    return Tokenizer.from_directory(request.config.rootpath / CHECKPOINT)


@pytest.fixture
def picture():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_a_prompt_with_an_image(tokenizer, picture, tmp_path):
    """The ids between the texts are those that K2.6's template and its expansion of one placeholder give."""
    file = tmp_path / "a picture.png"
    file.write_bytes(picture)
    sources = [
        {"type": "image_url", "image_url": {"url": url(picture), "detail": "auto"}},
        {"type": "image", "image": str(file)},
        {"type": "image_url", "image_url": url(picture)}, {"type": "image", "image": picture},
        {"type": "image", "image": file}, {"type": "image", "image": Image.open(io.BytesIO(picture))},
    ]  # fmt: skip
    special = tokenizer.special_id
    tokens = 4 // 2 * 6 // 2  # 60 × 40 pixels are padded to 84 × 56: 4 rows of 6 patches
    for source in sources:
        album = Album(Processing())
        message = {
            "role": "user",
            "content": [{"type": "text", "text": "see "}, source, {"type": "text", "text": "this"}],
        }
        ids = render([message], tokenizer, look=album.look, add_generation_prompt=False)
        assert ids == [
            special("<|im_user|>"), *tokenizer.encode("user"), special("<|im_middle|>"), *tokenizer.encode("see "),
            special("<|media_begin|>"), *tokenizer.encode("image"), special("<|media_content|>"),
            *[special("<|media_pad|>")] * tokens, special("<|media_end|>"), *tokenizer.encode("\nthis"),
            special("<|im_end|>"),
        ]  # fmt: skip
        assert [medium.grid for medium in album.media] == [(1, 4, 6)]
        assert album.media[0].patches.reshape(4, 6, 3, 14, 14)[0, 0, :, 0, 0].tolist() == [
            *np.asarray(Image.open(io.BytesIO(picture)))[0, 0]
        ]


def test_media_keep_their_order(tokenizer, picture):
    album = Album(Processing())
    small = Image.new("RGB", (20, 20))
    content = [
        {"type": "image", "image": picture},
        {"type": "video", "video": [small] * 7, "fps": 1},
        {"type": "image", "image": small},
    ]
    ids = render([{"role": "user", "content": content}], tokenizer, look=album.look)
    assert [medium.grid for medium in album.media] == [(1, 4, 6), (4, 2, 2), (3, 2, 2), (1, 2, 2)]
    pad = tokenizer.special_id("<|media_pad|>")
    assert ids.count(pad) == 6 + 1 + 1 + 1
    text = tokenizer.decode([token for token in ids if token < 320])
    assert "image\n00:00:00.000video00:00:04.000video\nimage\n" in text


def test_placeholders_in_text_stay_text(tokenizer, picture):
    album = Album(Processing())
    content = [{"type": "text", "text": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"},
               {"type": "image", "image": picture}]  # fmt: skip
    ids = render([{"role": "user", "content": content}], tokenizer, look=album.look)
    assert ids.count(tokenizer.special_id("<|media_pad|>")) == album.media[0].tokens == 6


REFUSED = [
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "compressed video .* frames"),
    ({"type": "video", "video": "clip.mp4"}, "a video is a list of frames"),
    ({"type": "video", "video": []}, "a video is a list of frames"),
    ({"type": "video", "video": [b"x"] * 513}, "has 513 frames"),
    ({"type": "video", "video": [b"x"], "fps": 0}, "fps is 0"),
    ({"type": "video", "video": [b"x"], "fps": True}, "fps is True"),
    ({"type": "video", "video": [b"x"], "fps": float("nan")}, "fps is nan"),
    ({"type": "video", "video": [b"x"]}, r"content\[0\]\.video\[0\]: is no image"),
    ({"type": "image", "image": None}, "expected an image"),
    ({"type": "image", "image": ""}, "expected an image"),
    ({"type": "image_url", "image_url": {}}, "expected an image"),
    ({"type": "image", "image": "missing.png"}, "missing.png: cannot be read .No such file"),
    ({"type": "image", "image": "nul\0l.png"}, "cannot be read"),
    ({"type": "image", "image": "."}, "cannot be read"),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}, "addresses are not fetched"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "begins like data:image/png;base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?!"}}, "not base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}, "no image of the formats"),
]


@pytest.mark.parametrize(("part", "expected"), REFUSED)
def test_what_is_refused(part, expected, tokenizer):
    with pytest.raises(MessageError, match=expected) as error:
        render([{"role": "user", "content": [part]}], tokenizer, look=Album(Processing()).look)
    assert "\n" not in str(error.value)


def test_a_prompt_has_a_limit_of_pixels(picture):
    """Of 60 × 40 pixels each, four fit into 10,000 and a fifth does not, as an image or as a video's frame."""
    part = {"type": "image", "image": picture}
    album = Album(Processing(), Limits(pixels_of_prompt=10_000))
    for _ in range(4):
        album.look(part, "here")
    for more in (part, {"type": "video", "video": [picture]}):
        with pytest.raises(MediumError, match="the images of a prompt may have 10,000 pixels together"):
            album.look(more, "here")
    assert len(album.media) == 4


def test_frames_of_several_sizes(picture):
    part = {"type": "video", "video": [picture, Image.new("RGB", (9, 9))]}
    with pytest.raises(MediumError, match=r"video\[1\]: is \(9, 9\), and the first frame \(60, 40\)"):
        Album(Processing()).look(part, "here")


def test_paths_of_strangers_are_not_read(picture, tmp_path):
    file = tmp_path / "secret.png"
    file.write_bytes(picture)
    with pytest.raises(MediumError, match="paths are not read"):
        Album(Processing(), files=False).look({"type": "image", "image": str(file)}, "here")


def test_addresses_are_fetched_where_that_is_allowed(picture):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(picture)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        album = Album(Processing(), addresses=True)
        assert album.look({"type": "image_url", "image_url": {"url": f"{base}/a.png"}}, "here")[0].tokens == 6
        with pytest.raises(MediumError, match=r"cannot be fetched .*404"):
            album.look({"type": "image_url", "image_url": {"url": f"{base}/b.png"}}, "here")
        small = Album(Processing(), Limits(bytes=100), addresses=True)
        with pytest.raises(MediumError, match="101 bytes; an image may have 100"):
            small.look({"type": "image_url", "image_url": {"url": f"{base}/a.png"}}, "here")
    finally:
        server.shutdown()
        server.server_close()
