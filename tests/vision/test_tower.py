"""Tower and projector against transformers' in float32, with the checkpoint's original names.

Tolerance 1e-5 of the largest value of a medium's rows. Every mistake that has been seen in other ports moves them by
more than a thousand times as much.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.parameters import bind
from kimi_jax.vision import positions, tower

pytestmark = pytest.mark.core

TOLERANCE = 1e-5


def relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


def encode(engine, media):
    groups = engine.layout.groups
    return engine.encoder([(index % groups, medium) for index, medium in enumerate(media)])


@pytest.mark.parametrize("mesh", ["local", pytest.param("hgx-ib-16", marks=pytest.mark.slow), "nvl72"])
def test_rows_on_every_mesh(mesh, engines, seen):
    """Images and chunks of 2 to 4 frames, below, at and above the size of the table of positions."""
    rows = encode(engines(mesh), seen.media)
    for medium, found, expected in zip(seen.media, rows, seen.rows, strict=True):
        assert relative(found, expected) < TOLERANCE, medium


def test_blocks_of_queries_and_padding_change_nothing(engines, seen, monkeypatch):
    """The same with scores of a few rows at a time, and behind padding of other content."""
    engine = engines()
    module = bind(engine.vision, engine.parameters["vision"])
    index = 4
    medium = seen.media[index]
    noise = np.random.default_rng(1).integers(0, 256, (512, medium.patches.shape[1]), dtype=np.uint8)
    noise[: len(medium.patches)] = medium.patches
    monkeypatch.setattr(tower, "QUERIES", 64)
    found = jax.jit(lambda *given: module(*given))(jnp.asarray(noise), jnp.asarray(medium.grid))
    assert relative(np.asarray(found)[: medium.tokens], seen.rows[index]) < TOLERANCE


MISTAKES = {
    "positions by a = -0.5": ("CUBIC", -0.5),
    "another base": ("BASE", 1e6),
    "frames are not averaged": ("MAX_FRAMES", 1),
}


@pytest.mark.parametrize("mistake", [*MISTAKES, "rows before columns", "tokens merge column by column"])
def test_a_mistake_is_seen(mistake, engines, seen, monkeypatch):
    index = 7 if "frames" in mistake else 3
    medium = seen.media[index]
    if mistake in MISTAKES:
        monkeypatch.setattr(positions, *MISTAKES[mistake])
    elif mistake == "rows before columns":
        right = tower.rotation

        def swapped(where, width):
            return right(positions.Places(where.frames, where.columns, where.rows), width)

        monkeypatch.setattr(tower, "rotation", swapped)
    else:
        right = tower.merged
        monkeypatch.setattr(tower, "merged", lambda x, grid: right(x, grid)[:, jnp.array([0, 2, 1, 3])])
    module = bind(engines().vision, engines().parameters["vision"])
    found = jax.jit(lambda *given: module(*given))(jnp.asarray(medium.patches), jnp.asarray(medium.grid))
    assert relative(np.asarray(found)[: medium.tokens], seen.rows[index]) > 1000 * TOLERANCE


@pytest.mark.slow
def test_media_share_a_group_s_ranks(engines, seen):
    """More media of one group than it has ranks take several calls, and every one finds its rows."""
    engine = engines("hgx-ib-16")
    media = [seen.media[index % 3] for index in range(engine.mesh.shape["tp"] + 2)]
    rows = engine.encoder([(1, medium) for medium in media])
    for index, found in enumerate(rows):
        assert relative(found, seen.rows[index % 3]) < TOLERANCE
