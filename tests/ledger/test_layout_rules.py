"""What a model and its drafter refuse of a layout, told before anything is read."""

import dataclasses
from pathlib import Path

import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.ledger.layout_rules import batch_dimensions, check, drafter_dimensions
from meshes.presets import Layout, LayoutError

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return ModelConfig.from_json(DATA / "tiny_random")


@pytest.fixture(scope="module")
def drafter() -> DrafterConfig:
    return DrafterConfig.from_json(DATA / "tiny_random_drafter")


def test_a_drafter_that_cannot_be_cut_is_refused_with_layouts_that_work(target, drafter):
    """8 heads of the target on tp 8; the drafter's 12 heads only allow 4."""
    check(target, Layout(ep=2, tp=8), drafter)
    odd = dataclasses.replace(drafter, num_attention_heads=12, num_key_value_heads=4)
    check(target, Layout(ep=4, tp=4), odd)
    with pytest.raises(
        LayoutError, match=r"drafter's heads 12: tp sizes that work are 1, 2, 4; nearest layouts: dp 1 × ep 4 × tp 4$"
    ):
        check(target, Layout(ep=2, tp=8), odd)


@pytest.mark.parametrize(("tp", "each", "fits"), [(4, 2, True), (8, 1, True), (16, 1, True), (12, None, False)])
def test_key_value_heads_are_split_or_copied(tp, each, fits, drafter):
    """8 of them: two or one a rank, one copied on two ranks each, and no way for 12."""
    layout = Layout(tp=tp)
    heads = {cut.name: cut for cut in drafter_dimensions(drafter, layout)}["drafter's key-value heads"]
    assert heads.fits(layout) is fits
    assert not fits or heads.each(layout) == each


def test_batches_are_padded():
    split = Layout(dp=2, ep=3, tp=8, cache="split")
    requests, positions = batch_dimensions(split, requests=7, positions=8190)
    assert (requests.each(split), positions.each(split)) == (2, 1024)
    assert [cut.name for cut in batch_dimensions(Layout(tp=8), 7, 8190)] == ["requests"]
