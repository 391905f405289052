"""Images in the server's chats: data: URLs become media of the request; nothing else of a stranger's is opened."""

import base64
import dataclasses
import io
import json

import pytest
from PIL import Image

from kimi_jax.server.errors import ApiError
from kimi_jax.server.service import Service
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.vision.config import VisionConfig

CHECKPOINT = "tests/data/tiny_random"
VOCABULARY = 576


@pytest.fixture(scope="module")
def service(request):
    folder = request.config.rootpath / CHECKPOINT
    tokenizer = Tokenizer.from_directory(folder)
    return Service("tiny", tokenizer, (322,), VOCABULARY, 4096, {}, vision=VisionConfig.from_json(folder))


def url(colour):
    stream = io.BytesIO()
    Image.new("RGB", (60, 40), colour).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def body(*images, **more):
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in images]
    content = [*parts, {"type": "text", "text": "Say it."}]
    given = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, **more}
    return json.dumps({key: value for key, value in given.items() if value is not None}).encode()


def test_images_are_the_request_s(service):
    prepared = service.chat(body(url("red"), url("blue"), n=2))
    first, second = prepared.requests
    assert [placed.medium.grid for placed in first.media] == [(1, 4, 6), (1, 4, 6)]
    for placed in first.media:
        assert list(first.ids[placed.first : placed.first + 6]) == placed.medium.ids()
    assert sum(token >= VOCABULARY for token in first.ids) == 12
    assert (second.ids, second.media) == (first.ids, first.media)
    counted = service.tokenize(body(url("red"), url("blue"), max_tokens=None))["count"]
    assert counted == len(first.ids)
    other = service.chat(body(url("red"), url("green"))).requests[0]
    differ = [index for index, (a, b) in enumerate(zip(first.ids, other.ids, strict=True)) if a != b]
    assert differ == list(range(first.media[1].first, first.media[1].first + 6))


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("README.md", "paths are not read here"),
        ("/etc/passwd", "paths are not read here"),
        ("file:///etc/passwd", "paths are not read here"),
        ("http://127.0.0.1:1/x.png", "addresses are not fetched"),
        ("data:image/png;base64,QUJD", "no image of the formats"),
    ],
)
def test_what_is_not_sent_along_is_refused(service, image, said):
    with pytest.raises(ApiError, match=said) as error:
        service.chat(body(image))
    assert error.value.status == 400


def test_a_server_without_a_tower_says_so(service):
    with pytest.raises(ApiError, match="this checkpoint has no vision tower"):
        dataclasses.replace(service, vision=None).chat(body(url("red")))
