"""Images through the commands and the library: files in, transformers' logits and one text out."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

CHECKPOINT = "tests/data/tiny_random"


def picture(medium):
    """The image that a medium was cut from."""
    _, rows, columns = medium.grid
    pixels = (
        medium.patches.reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)
    )
    return Image.fromarray(np.ascontiguousarray(pixels))


@pytest.fixture
def files(prompt_media, tmp_path):
    """The fixture's two images as files."""
    for name, medium in zip("ab", prompt_media, strict=True):
        picture(medium).save(tmp_path / f"{name}.png")
    return [tmp_path / "a.png", tmp_path / "b.png"]


def test_evaluate_logits(command, files, vision_reference, tmp_path):
    """From files to logits: what transformers has for the same pixels."""
    (tmp_path / "ids.json").write_text(json.dumps(vision_reference["prompt_ids"].tolist()))
    given = ("--checkpoint", CHECKPOINT, "--input-ids", tmp_path / "ids.json", "--output", tmp_path / "out.npz")
    command("evaluate", "logits", *given, "--image", files[0], "--image", files[1])
    found = np.load(tmp_path / "out.npz")["logits"]
    np.testing.assert_allclose(found, vision_reference["prompt_logits"], atol=1e-4)
    error = command("evaluate", "logits", *given, "--image", files[0], expect=1).err
    assert "10 placeholders (341) and its 1 images and chunks of video need 6" in error


def test_a_missing_image_is_refused_before_anything_is_read(command):
    error = command("decode", "--image", "nowhere.png", "What is it?", expect=1).err
    assert error.strip().endswith("nowhere.png: no such image")
    error = command("decode", "--raw", "--image", "README.md", "What is it?", expect=1).err
    assert "raw prompts are plain text" in error


@pytest.mark.slow
def test_decode(command, files, tmp_path):
    """An image as an option, as a path and as a data: URL of a row give one text, with and without drafts."""
    options = ("--checkpoint", CHECKPOINT, "--max-new-tokens", "6", "--instant", "--json")
    drafter = ("--drafter", "tests/data/tiny_random_drafter", "--budget", "7")

    def texts(*arguments):
        results = json.loads(command("decode", *options, *arguments).out)["results"]
        return [(result["token_ids"], result["prompt_tokens"]) for result in results]

    (expected,) = texts("--image", files[0], "Say it.")
    url = "data:image/png;base64," + base64.b64encode(files[0].read_bytes()).decode()
    text = {"type": "text", "text": "Say it."}
    rows = [[{"type": "image_url", "image_url": {"url": url}}, text], [{"type": "image", "image": str(files[0])}, text],
            [{"type": "image", "image": str(files[1])}, text]]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"messages": [{"role": "user", "content": row}]}) for row in rows)
    )
    found = texts("--file", tmp_path / "rows.jsonl", "--batch", "2", *drafter)
    assert found[:2] == [expected, expected]
    assert found[2] != expected


@pytest.mark.slow
def test_chat(engines, prompt_media):
    """The library takes bytes and images of Pillow's, as a message or as its parts alone."""
    image = picture(prompt_media[0])
    stream = io.BytesIO()
    image.save(stream, "PNG")
    text = {"type": "text", "text": "Say it."}
    asked = [[{"type": "image", "image": image}, text], [{"type": "image", "image": stream.getvalue()}, text]]
    asked[1] = [{"role": "user", "content": asked[1]}]
    texts = [
        engines().chat(
            messages,
            thinking=False, max_new_tokens=5,
        ).token_ids
        for messages in asked
    ]  # fmt: skip
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_compare(command, files):
    """One checkpoint on two machines, with an image before every text."""
    out = command(
        "evaluate", "compare", "--checkpoint", CHECKPOINT, "--image", files[1], "--other", "mesh=hgx-ib-8",
        "--tokens", "24", "--json",
    ).out  # fmt: skip
    result = json.loads(out)
    assert result["tokens"] > 10 * 24
    assert result["top1_agreement"] == 1
    assert result["largest_logit_difference"] < 1e-3
