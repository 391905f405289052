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
from kimi_jax.serving import plan
from kimi_jax.serving.plan import Admission, Plan, Settings
from kimi_jax.vision.media import Medium, MediumError, Placed

GREEDY = Sampling()
TOLERANCE = 1e-4


@pytest.mark.parametrize("mesh", ["local", pytest.param("hgx-ib-16", marks=pytest.mark.slow), "nvl72"])
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


def expected_texts(engines, ids, prompt_media):
    """Of the fixture's prompt, with its pictures and with others."""
    inverted = [Medium(255 - medium.patches, medium.grid) for medium in prompt_media]
    both = [tuple(prompt_media), tuple(inverted)]
    expected = [continuation(engines(), ids, media, 5) for media in both]
    assert expected[0] != expected[1], "the text should depend on the pictures"
    return [Request(ids, GREEDY, 0, 5, stop_ids=(), media=media) for media in both], expected


def test_greedy_text_is_that_of_the_logits(engines, vision_reference, prompt_media):
    asked, expected = expected_texts(engines, vision_reference["prompt_ids"][0].tolist(), prompt_media)
    assert texts(engines(), asked, Limits(), Draft(budget=7)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "draft"), [("local", "none"), ("local", "ddtree"), ("hgx-ib-16", "ddtree")])
def test_neighbours_change_nothing(mesh, draft, engines, vision_reference, prompt_media):
    """In small chunks, beside requests that come and go: the same prompt, with other pictures, and text alone."""
    ids = vision_reference["prompt_ids"][0].tolist()
    asked, expected = expected_texts(engines, ids, prompt_media)
    text = Request(ids[:9], GREEDY, 0, 9, stop_ids=())
    limits, way = Limits(prefill_chunk=16), Draft(draft, 7)
    found = texts(engines(mesh), [text, *asked, asked[0]], limits, way, slots=2)
    assert found[1:] == [*expected, expected[0]]


@pytest.mark.slow
def test_kept_pages_know_their_pictures(engines, vision_reference, prompt_media):
    """Prompts that differ in a picture alone share the pages before it and no other, and their texts are their own."""
    engine = dataclasses.replace(engines(), drafter=None)
    page = engine.programs().page_tokens
    text, rest = np.random.default_rng(0).integers(0, 300, (2, 2 * page)).tolist()
    first = text[: page + 5]  # the picture stands in the second page
    ids = [*first, *[341] * 6, *rest]
    inverted = Medium(255 - prompt_media[0].patches, prompt_media[0].grid)
    expected = [continuation(engines(), ids, [medium], 4) for medium in (prompt_media[0], inverted)]
    queue = engine.queue(1, 5 * page, Limits(prefill_chunk=page), Draft(kind="none"))
    reused, texts = [], []
    for number, medium in enumerate((prompt_media[0], inverted, prompt_media[0], inverted)):
        content, media = queue.session.placed(ids, [medium])
        before = queue.scheduler.reused_tokens
        queue.submit(plan.Request(str(number), tuple(content), 4, media=media))
        texts.append([])
        while not queue.idle:
            for event, _ in queue.step():
                texts[-1] += event.tokens
        reused.append(queue.scheduler.reused_tokens - before)
    assert texts == [*expected, *expected]
    assert reused[:2] == [0, page], "the second page has another picture"
    assert min(reused[2:]) >= 2 * page, "the pictures' own pages are kept"


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
    sent = Plan(0, admissions=(Admission(0, "a", 40, 5, 0, Settings(), media=placed),))
    again = Plan.from_json(sent.to_json())
    assert again == sent
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
