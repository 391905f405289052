"""Which cases are refused, and what is said of programs that do not lower."""

import dataclasses

import jax
import pytest

from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.compile import CompileError, abstract_parameters, compile_for, program_arguments, programs_of
from meshes.devices import build_mesh
from meshes.presets import LayoutError, preset


def case_on(mesh: str, card: str, **changes) -> Case:
    return Case(k26(), preset(mesh), card, requests=64, context=8192, drafter=kimi_drafter(), **changes)


def test_a_drafter_that_tp_does_not_divide_is_named():
    case = case_on("nvl72", "gb300")
    uneven = dataclasses.replace(case, drafter=dataclasses.replace(kimi_drafter(), intermediate_size=18_436))
    with pytest.raises(LayoutError, match=r"tp 8 does not divide drafter's MLP width 18436"):
        programs_of(uneven, build_mesh(case.preset, jax.devices()))


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
