"""What a round must move: weights by part beside the estimator's own count, and figures worked out by hand."""

import dataclasses

import jax
import pytest

from kimi_jax.estimator.model import k26
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.step import estimate
from kimi_jax.profiling.case import Case, kimi_drafter
from kimi_jax.profiling.compile import (
    CompileError,
    abstract_parameters,
    compile_for,
    placed_weights,
    program_arguments,
    programs_of,
)
from kimi_jax.profiling.necessary import needs, touched_experts, weight_bytes, weight_part
from meshes.devices import build_mesh
from meshes.hardware import gpu
from meshes.presets import preset


def case_on(mesh: str, card: str, **changes) -> Case:
    return Case(k26(), preset(mesh), card, requests=64, context=8192, drafter=kimi_drafter(), **changes)


def weights_of(case: Case):
    return placed_weights(programs_of(case, build_mesh(case.preset, jax.devices())))


@pytest.mark.parametrize(("mesh", "card"), [("hgx-ib-16", "h200"), ("nvl36", "gb200"), ("nvl72", "gb300")])
def test_weights_are_the_estimators(mesh, card):
    case = case_on(mesh, card)
    held = weight_bytes(weights_of(case))
    scenario = make_scenario(case.preset, gpu(card), concurrency=64, context=8192, budget=16)
    expected = estimate(scenario).memory.weights
    assert held.keys() == expected.keys() | {"drafter"}
    for part, num_bytes in expected.items():
        assert held[part] == pytest.approx(num_bytes, rel=1e-3), part
    # The drafter's 3.479 B weights (the published file is 6.48 GiB) over tp; the taps' fusion and heads are split.
    tp = case.preset.layout.tp
    assert held["drafter"] == pytest.approx(6.957e9 / tp, rel=1e-3)


def test_needs_of_nvl72():
    case = case_on("nvl72", "gb300")
    weights = weights_of(case)
    needed = needs(case, weights)
    assert (case.device_requests, case.rows, case.padded_requests, case.depth) == (8, 17, 72, 7)
    # 72 requests × 17 rows choose 8 of 384: nearly all of the 432 slots' 384 experts, over 72 ranks.
    assert touched_experts(case) == pytest.approx(384 * (1 - (1 - 8 / 384) ** (72 * 17)) / 72)
    expert_bytes = 3 * 7168 * 2048 * 4.5 / 8
    assert needed["experts"].hbm_bytes == pytest.approx(60 * touched_experts(case) * expert_bytes)
    assert needed["experts"].flops == pytest.approx(60 * 2 * 3 * 7168 * 2048 * 72 * 17 * 8 / 72)
    held = weight_bytes(weights)
    cache = 8 * 8192 * 576 * 2 * 61
    assert needed["attention"].hbm_bytes == held["attention"] + cache
    # Head and drafter: the head is read by both, the ring of 4096 positions holds one of the 8 heads on each rank.
    assert needed["head"].hbm_bytes == held["head"]
    assert needed["drafter"].hbm_bytes == held["drafter"] + held["head"] + 8 * 4096 * 6 * 128 * 2 * 2
    assert needed["tree"].hbm_bytes == 8 * 7 * 163840 / 8 * 4


def test_a_prefill_needs_the_drafter_s_context_only():
    case = case_on("nvl72", "gb300", program="prefill")
    needed = needs(case, weights_of(case))
    # Keys and values of one head in six layers, an eighth of the fusion of six taps, norms of 128 and 7168.
    projections = 6 * (2 * 128 * 7168 + 128) + 6 * 7168 * 7168 // 8 + 7168
    assert needed["drafter"].hbm_bytes == 2 * projections


def test_a_split_cache_is_read_in_parts():
    machine = preset("nvl72")
    split = machine.with_layout(dataclasses.replace(machine.layout, cache="split"))
    whole = case_on("nvl72", "gb300")
    case = dataclasses.replace(whole, preset=split)
    cache = 8 * 8192 * 576 * 2 * 61
    read, read_in_parts = (needs(c, weights_of(c))["attention"].hbm_bytes for c in (whole, case))
    assert read - read_in_parts == cache - cache / 8


def test_plain_decoding_needs_no_drafter():
    case = case_on("nvl72", "gb300", budget=0)
    needed = needs(case, weights_of(case))
    assert case.rows == 1
    assert not {"drafter", "tree"} & needed.keys()


def test_a_weight_of_no_part_is_refused():
    with pytest.raises(ValueError, match="belongs to no known part"):
        weight_part("target.model.unknown.weight")


def test_a_weight_that_an_axis_does_not_divide_is_named():
    case = case_on("nvl72", "gb300")
    programs = programs_of(case, build_mesh(case.preset, jax.devices()))
    uneven = dataclasses.replace(programs, rules={**programs.rules, "heads": ("ep", "tp")})
    with pytest.raises(CompileError, match=r"self_attn\.\w+\.weight has \d+ in dimension \d, which ep × tp \(72"):
        placed_weights(uneven)


def test_what_does_not_lower_names_layer_part_and_axis(monkeypatch):
    """A reduction that fails in the first layer's attention half, after that of the embedding."""
    case = case_on("nvl72", "gb300", budget=0)
    programs = programs_of(case, build_mesh(case.preset, jax.devices()))
    arguments = program_arguments(case, programs, abstract_parameters(programs))
    psum, calls = jax.lax.psum, []

    def failing(x, axis):
        calls.append(axis)
        if len(calls) == 2:
            raise ValueError("refused")
        return psum(x, axis)

    monkeypatch.setattr(jax.lax, "psum", failing)
    with pytest.raises(CompileError, match=r"round program .* does not lower in layer 0, over axis tp: refused"):
        compile_for(case, programs, arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "requests is 0"),
        ({"context": 0}, "context is 0"),
        ({"budget": -1}, "budget is -1"),
        ({"drafter": None}, "needs a drafter"),
        ({"program": "train"}, "choose from round, decode, prefill"),
    ],
)
def test_bad_cases_are_refused(changes, message):
    good = case_on("nvl72", "gb300")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **changes)
