import dataclasses

import pytest

from kimi_jax.estimator.explain import explain
from kimi_jax.estimator.kernels import ATTENTION, EXPERTS, OVERHEADS
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.step import estimate
from kimi_jax.ledger.constants import Constants
from meshes import gpu, preset


@pytest.fixture(scope="module")
def scenario():
    return make_scenario(preset("hgx-ib-16"), gpu("b300"), concurrency=8, context=8192, budget=8)


def test_every_constant_has_a_source_and_is_explained(scenario):
    effects = {e.name: e for e in explain(scenario)}
    for field in dataclasses.fields(Constants):
        assert field.metadata["source"]
        assert field.metadata["kind"] in ("measured", "derived", "calibrated", "assumed")
        assert field.name in effects
    assert {"gpu.hbm_bytes_per_s", "kernels.attention.us", "link.one_shot_us"} < set(effects)
    assert all(piece.source for table in (ATTENTION, EXPERTS, OVERHEADS) for piece in table.values())
    assert [e.swing for e in effects.values()] == sorted((e.swing for e in effects.values()), reverse=True)


def test_effect_is_what_the_estimate_does(scenario):
    (effect,) = explain(scenario, ("attention.us",))
    slower = dataclasses.replace(scenario.kernels.attention, us=1.2 * scenario.kernels.attention.us)
    kernels = dataclasses.replace(scenario.kernels, attention=slower)
    changed = estimate(dataclasses.replace(scenario, kernels=kernels)).tokens_per_s_per_user
    assert effect.name == "kernels.attention.us"
    assert effect.higher == pytest.approx(changed / estimate(scenario).tokens_per_s_per_user - 1)
    assert effect.higher < 0 < effect.lower


def test_inputs_that_rebuild_routing_and_acceptance_have_an_effect(scenario):
    for name in ("hit_rate", "zipf_offset", "tree_diversity", "sibling_share", "network_link"):
        (effect,) = explain(scenario, (name,))
        assert effect.swing > 1e-4, name


def test_unknown_constant_is_refused_with_the_choice(scenario):
    with pytest.raises(ValueError, match=r"no constant 'speed_of_light': choose from gpu.hbm_bytes_per_s"):
        explain(scenario, ("speed_of_light",))
