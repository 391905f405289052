"""Preprocessing against the published table of sizes and torch's pixels, and pictures of every odd kind."""

import contextlib
import io

import numpy as np
import pytest
from PIL import Image

from kimi_jax.config_fields import ConfigError
from kimi_jax.vision.images import Limits, Processing, opened
from kimi_jax.vision.media import MOST_PATCHES, MediumError, bucket, buckets
from kimi_jax.vision.tower import QUERIES

SIZES = [  # width and height of an image, resized, padded, rows and columns of patches, tokens
    ((14, 14), (14, 14), (28, 28), (2, 2), 1),
    ((28, 28), (28, 28), (28, 28), (2, 2), 1),
    ((29, 57), (29, 57), (56, 84), (6, 4), 6),
    ((13, 300), (13, 300), (28, 308), (22, 2), 11),
    ((224, 224), (224, 224), (224, 224), (16, 16), 64),
    ((512, 512), (512, 512), (532, 532), (38, 38), 361),
    ((640, 480), (640, 480), (644, 504), (36, 46), 414),
    ((1024, 768), (1024, 768), (1036, 784), (56, 74), 1036),
    ((1920, 1080), (1920, 1080), (1932, 1092), (78, 138), 2691),
    ((3840, 2160), (2392, 1345), (2408, 1372), (98, 172), 4214),
    ((8000, 500), (7168, 448), (7168, 448), (32, 512), 4096),
    ((7200, 7200), (1792, 1792), (1792, 1792), (128, 128), 4096),
    ((1, 1), (1, 1), (28, 28), (2, 2), 1),
    ((20_000, 10), (7168, 3), (7168, 28), (2, 512), 256),
]


@pytest.mark.parametrize(("size", "resized", "padded", "grid", "tokens"), SIZES)
def test_sizes(size, resized, padded, grid, tokens):
    processing = Processing()
    assert processing.resized(*size, processing.in_patch_limit) == resized
    assert processing.padded(*resized) == padded
    assert processing.grid(*size) == (1, *grid)
    assert grid[0] * grid[1] // 4 == tokens


def test_frames_have_a_limit_of_their_own():
    processing = Processing()
    assert processing.resized(1920, 1080, processing.in_patch_limit_each_frame) == (1196, 672)
    assert processing.padded(1196, 672) == (1204, 672)


def test_every_grid_has_a_program():
    """Padding can exceed the limit of 16,384 patches, but never the largest program."""
    processing, rng = Processing(), np.random.default_rng(0)
    sides = np.exp(rng.uniform(0, np.log(30_000), (20_000, 2))).astype(int)
    sides = [
        *sides.tolist(),
        *[(w, 8000) for w in range(1, 8000, 7)],
        *[(14 * n - 1, 14 * n - 1) for n in range(1, 200)],
    ]
    most = max(np.prod(processing.grid(*size)) for size in sides)
    assert 16_384 < most <= MOST_PATCHES
    expected = [256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 18_432]
    assert list(buckets()) == expected
    assert not any(size % QUERIES for size in expected)
    assert [bucket(count) for count in (1, 256, 257, 10_764, 16_385)] == [256, 256, 512, 12_288, 18_432]


def test_patches_are_cut_and_padded():
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (57, 29, 3), dtype=np.uint8)
    medium = Processing().image(Image.fromarray(pixels))
    assert medium.grid == (1, 6, 4)
    for row in range(6):
        for column in range(4):
            patch = medium.patches[row * 4 + column].reshape(3, 14, 14)
            expected = np.zeros((14, 14, 3), np.uint8)
            part = pixels[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
            expected[: part.shape[0], : part.shape[1]] = part
            np.testing.assert_array_equal(patch.transpose(1, 2, 0), expected)


def test_resized_pixels(vision_reference):
    """Within one step of 255 of torch's antialiased bicubic, which torchvision's processor calls."""
    image = vision_reference["wide_image"]
    medium = Processing().image(Image.fromarray(image))
    assert medium.grid == (1, 2, 512)
    rows = medium.patches.reshape(2, 512, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 7168, 3)
    expected = vision_reference["wide_resized"]
    difference = np.abs(rows[: len(expected), ::16].astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert not rows[len(expected) :].any()


def test_video_chunks():
    """Frames are sampled at two a second and seen four at a time; the last chunk may be shorter."""
    frames = [Image.new("RGB", (30, 20), (index, 0, 0)) for index in range(31)]
    chunks = Processing().video(frames, fps=6.0)
    # 31 frames at 6 a second: 10 are kept, of indices round(0, 3.33, …, 30)
    kept = [0, 3, 7, 10, 13, 17, 20, 23, 27, 30]
    assert [second for second, _ in chunks] == [0, 13 / 6, 27 / 6]
    assert [medium.grid for _, medium in chunks] == [(4, 2, 4), (4, 2, 4), (2, 2, 4)]
    reds = [
        int(part.reshape(-1, 8, 3, 196)[frame, 0, 0, 0])
        for _, m in chunks
        for part in [m.patches]
        for frame in range(m.grid[0])
    ]
    assert reds == kept
    assert [m.grid[0] for _, m in Processing().video(frames[:1], fps=1.0)] == [1]


def encoded(image, format="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def read(data):
    return np.asarray(opened(data, "picture", Limits()))


def test_odd_pictures():
    """As Pillow's `convert("RGB")` has them, which is what the checkpoint's own preprocessing calls."""
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)
    colour = Image.fromarray(pixels)
    np.testing.assert_array_equal(read(encoded(colour)), pixels)
    alpha = Image.fromarray(np.dstack([pixels, np.full((9, 7), 3, np.uint8)]))
    np.testing.assert_array_equal(read(encoded(alpha)), pixels)
    grey = colour.convert("L")
    np.testing.assert_array_equal(read(encoded(grey)), np.repeat(np.asarray(grey)[..., None], 3, 2))
    palette = colour.quantize(16)
    np.testing.assert_array_equal(read(encoded(palette)), np.asarray(palette.convert("RGB")))
    bits = colour.convert("1")
    np.testing.assert_array_equal(read(encoded(bits)), np.asarray(bits.convert("RGB")))
    cmyk = encoded(colour.convert("CMYK"), "JPEG")
    np.testing.assert_array_equal(read(cmyk), np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB")))
    turned = Image.Exif()
    turned[0x0112] = 6
    assert read(encoded(colour, "JPEG", exif=turned)).shape == (9, 7, 3)  # pixels as they are stored
    for format in ("WEBP", "GIF", "BMP", "JPEG"):
        assert read(encoded(colour, format)).shape == (9, 7, 3)
    assert read(encoded(Image.new("RGB", (1, 1)))).shape == (1, 1, 3)


def test_pictures_that_are_refused():
    picture = Image.new("RGB", (40, 30), "red")
    frames = encoded(picture, "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30), "blue")])
    deep = encoded(Image.fromarray(np.zeros((4, 4), np.uint16)))
    whole = encoded(Image.fromarray(np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)))
    bomb = encoded(Image.new("1", (30_000, 30_000)))
    assert len(bomb) < 200_000
    cases = [
        (frames, "has 2 frames"), (deep, "more than 8 bits"), (b"", "no image of the formats"),
        (b"GIF89a", r"cannot be|no image"),
        (whole[: len(whole) // 2], r"cannot be decoded .*whole"),
        (bomb, r"30000 × 30000|larger than any image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of the formats"),
        (b"\0" * (33 << 20), r"33,?554|bytes"),
    ]  # fmt: skip
    for data, expected in cases:
        with pytest.raises(MediumError, match=expected) as error:
            opened(data, "picture", Limits())
        assert str(error.value).startswith("picture: ")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_pictures(format):
    """Any damage gives pixels or a MediumError, never anything else."""
    rng = np.random.default_rng(4)
    whole = encoded(Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)), format)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.integers(1, 6)):
            data[rng.integers(len(data))] = rng.integers(256)
        with contextlib.suppress(MediumError):
            opened(bytes(data[: rng.integers(1, len(data) + 1)]), "picture", Limits(pixels=1_000_000))


def test_processing_of_a_checkpoint():
    published = {
        "in_patch_limit": 16384, "patch_size": 14, "merge_kernel_size": 2, "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None, "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "sample_fps": 2.0,
        "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    assert Processing.from_dict({"media_proc_cfg": published}) == Processing()
    smaller = Processing.from_dict({"media_proc_cfg": published | {"in_patch_limit": 64}})
    assert smaller.grid(1000, 1000) == (1, 8, 8)
    for change, expected in [
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean"), ({"fixed_output_tokens": 256}, "fixed_output_tokens"),
        ({"in_patch_limit": 10**9}, "in_patch_limit"), ({"merge_kernel_size": 4}, "merge_kernel_size"),
        ({"sample_fps": "two"}, "sample_fps"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=rf"media_proc_cfg\.{expected}"):
            Processing.from_dict({"media_proc_cfg": published | change})
