"""Images in prompts: the whole model's logits against transformers', and texts that depend on nothing else.

Tolerance 1e-4 on logits, as for text (tests/model/test_reference.py).
"""

import dataclasses

import numpy as np
import pytest

from kimi_jax.config import SIZES
from kimi_jax.decoding.generate import Limits, Request
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.speculation import Draft
from kimi_jax.serving.plan import Admission, Plan, Settings
from kimi_jax.vision.media import Medium, MediumError, Placed

GREEDY = Sampling()
TOLERANCE = 1e-4


@pytest.mark.parametrize("mesh", ["local", "hgx-ib-16", "nvl72"])
def test_logits_with_two_images(mesh, engines, vision_reference, prompt_media):
    ids = vision_reference["prompt_ids"][0].tolist()
    found = engines(mesh).logits(ids, prompt_media)
    np.testing.assert_allclose(found, vision_reference["prompt_logits"][0], atol=TOLERANCE)


def test_other_pictures_give_other_logits(engines, vision_reference, prompt_media):
    """The comparison above could not fail if pictures did not count."""
    ids = vision_reference["prompt_ids"][0].tolist()
    inverted = [Medium(255 - medium.patches, medium.grid) for medium in prompt_media]
    first = ids.index(341)
    right, wrong = engines().logits(ids, prompt_media), engines().logits(ids, inverted)
    np.testing.assert_array_equal(right[:first], wrong[:first])
    assert np.abs(right[first:] - wrong[first:]).max(1).min() > 10 * TOLERANCE


def texts(engine, requests, limits, draft, slots=None):
    found = [[] for _ in requests]
    for progress in engine.serve(requests, limits, draft, slots):
        for index, new in enumerate(progress.new_tokens):
            found[index] += new
    return found


def continuation(engine, ids, media, count):
    """The greedy text by the logits of ever longer sequences."""
    ids, prompt = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(engine.logits(ids, media)[-1].argmax()))
    return ids[prompt:]


@pytest.mark.parametrize(
    ("mesh", "draft"),
    [
        ("local", Draft(budget=7)),
        pytest.param("local", Draft(kind="none"), marks=pytest.mark.slow),
        pytest.param("hgx-ib-16", Draft(budget=7), marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_that_of_the_logits(mesh, draft, engines, vision_reference, prompt_media):
    """In small chunks, beside neighbours that come and go: the same prompt, with other pictures, and text alone."""
    ids = vision_reference["prompt_ids"][0].tolist()
    inverted = [Medium(255 - medium.patches, medium.grid) for medium in prompt_media]
    expected = [continuation(engines(), ids, media, 5) for media in (prompt_media, inverted)]
    assert expected[0] != expected[1], "the text should depend on the pictures"
    asked = [Request(ids, GREEDY, 0, 5, stop_ids=(), media=tuple(media)) for media in (prompt_media, inverted)]
    text = Request(ids[:9], GREEDY, 0, 9, stop_ids=())
    found = texts(engines(mesh), [text, *asked, asked[0]], Limits(prefill_chunk=16), draft, slots=2)
    assert found[1:] == [*expected, expected[0]]


def test_what_does_not_fit_is_refused(engines, vision_reference, prompt_media):
    ids = vision_reference["prompt_ids"][0].tolist()
    with pytest.raises(MediumError, match=r"10 placeholders \(341\) and its 1 images .* need 6"):
        engines().logits(ids, prompt_media[:1])
    with pytest.raises(MediumError, match=r"10 placeholders .* need 16"):
        next(engines().generate([ids], Limits(), GREEDY, media=[[*prompt_media, prompt_media[0]]]))
    apart = [*ids[:10], 5, *ids[10:]]
    with pytest.raises(MediumError, match="6 placeholders of medium 1 do not stand side by side"):
        engines().logits(apart, prompt_media)
    blind = dataclasses.replace(engines(), vision=None)
    with pytest.raises(MediumError, match="no vision tower"):
        blind.logits(ids, prompt_media)
    with pytest.raises(MediumError, match="no vision tower"):
        next(blind.generate([ids], Limits(), GREEDY, media=[prompt_media]))


def test_plans_carry_patches(prompt_media):
    """A process that follows gets the same media, with the same numbers."""
    placed = tuple(Placed(first, medium) for first, medium in zip((3, 20), prompt_media, strict=True))
    plan = Plan(0, admissions=(Admission(0, "a", 40, 5, 0, Settings(), media=placed),))
    again = Plan.from_json(plan.to_json())
    assert again == plan
    for before, after in zip(placed, again.admissions[0].media, strict=True):
        np.testing.assert_array_equal(before.medium.patches, after.medium.patches)
        assert before.medium.ids() == after.medium.ids()


def test_numbers_of_content(prompt_media):
    """Beyond any vocabulary, within int32, other ones for every pixel's change and every place."""
    medium = prompt_media[0]
    ids = medium.ids()
    assert len(ids) == medium.tokens == len(set(ids))
    assert SIZES["vocab_size"][1] <= min(ids) <= max(ids) < 2**31
    changed = medium.patches.copy()
    changed[7, 300] ^= 1
    assert not set(ids) & set(Medium(changed, medium.grid).ids())
    turned = Medium(medium.patches, (medium.grid[0], medium.grid[2], medium.grid[1]))
    assert not set(ids) & set(turned.ids())
