"""Options that several commands take: one declaration, the same names, choices from the tables."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from kimi_jax.commands import convert, decode, doctor, estimate, evaluate, profile
from kimi_jax.commands.options import EngineOptions, LayoutOptions, SpeculationOptions, changed, of_values, parse
from kimi_jax.commands.scenario import Place
from kimi_jax.opening import BUNDLED_CHECKPOINT, BUNDLED_DRAFTER
from kimi_jax.parallel.exchange import BACKENDS
from meshes.presets import PRESETS, LayoutError

FORMS = (
    decode.Options, convert.PlanOptions, doctor.Options, Place, estimate.CheckOptions, profile.Options,
    evaluate.PerplexityOptions, evaluate.CompareOptions,
)  # fmt: skip


def parsed(form, *args):
    return parse(form, [*args, "text"] if form is evaluate.PerplexityOptions else list(args), None, None)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.__module__}.{form.__name__}")
def test_what_is_registered_is_accepted_everywhere(form, monkeypatch):
    monkeypatch.setitem(BACKENDS, "gather_all", BACKENDS["allgather"])
    monkeypatch.setitem(PRESETS, "nvl144", PRESETS["nvl72"])
    options = parsed(
        form, "--mesh", "nvl144", "--exchange", "gather_all", "--ep", "18", "--tp", "2", "--cache", "split"
    )
    layout = options.layout.preset().layout
    assert (layout.ep, layout.tp, layout.exchange, layout.cache) == (18, 2, "gather_all", "split")


def test_unknown_names_say_what_there_is():
    known = "auto, allgather, hierarchical, alltoall, ragged"
    with pytest.raises(LayoutError, match=f"exchange is 'ring': choose from {known}"):
        LayoutOptions(exchange="ring").preset()
    with pytest.raises(LayoutError, match="nvl99"):
        LayoutOptions("nvl99").preset()


def test_the_help_names_every_exchange_and_machine(capsys):
    with pytest.raises(SystemExit):
        parse(doctor.Options, ["--help"], None, None)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    families = {name.rstrip("0123456789").removesuffix("-") for name in PRESETS if name.startswith("hgx")}
    assert all(name in shown for name in (*BACKENDS, *families, *(p for p in PRESETS if not p.startswith("hgx"))))


def test_requests_together_have_one_name():
    for form in (Place, estimate.CheckOptions, profile.Options):
        assert parsed(form, "--batch", "7").batch == parsed(form, "--concurrency", "7").batch == 7
    assert parsed(estimate.SweepOptions, "--concurrencies", "1", "8").batches == (1, 8)


def test_the_other_differs_by_what_is_said():
    first = EngineOptions(layout=LayoutOptions("hgx-ib-16", ep=4, tp=4, cache="split"), workers=3)
    assert changed(first, ()) == first
    assert changed(first, ("ep=8", "tp=2")).layout == LayoutOptions("hgx-ib-16", ep=8, tp=2, cache="split")
    other = changed(first, ("mesh=nvl72", "dtype=bfloat16"))
    assert (other.layout, other.dtype, other.workers) == (LayoutOptions("nvl72", cache="split"), "bfloat16", 3)
    with pytest.raises(ValueError, match="nvl72: expected NAME=VALUE"):
        changed(first, ("nvl72",))
    with pytest.raises(SystemExit):
        changed(first, ("tolerance=1",))


def test_values_by_name_reach_their_groups():
    options = of_values(SpeculationOptions, {"checkpoint": "a/b", "mesh": "nvl72", "ep": 72, "budget": 7})
    assert (options.checkpoint, options.layout, options.budget) == (Path("a/b"), LayoutOptions("nvl72", ep=72), 7)


def test_the_bundled_drafter_belongs_to_the_bundled_checkpoint(monkeypatch):
    said = io.StringIO()
    console = Console(file=said, width=200)
    monkeypatch.chdir(BUNDLED_CHECKPOINT.parent)
    for checkpoint in (BUNDLED_CHECKPOINT, Path("small")):
        assert SpeculationOptions(checkpoint=checkpoint).used_drafter(console) == BUNDLED_DRAFTER
    assert said.getvalue() == ""
    other = Path("elsewhere")
    assert SpeculationOptions(checkpoint=other, drafter=Path("own")).used_drafter(console) == Path("own")
    assert SpeculationOptions(checkpoint=other, speculation="none").used_drafter(console) is None
    assert said.getvalue() == ""
    assert SpeculationOptions(checkpoint=other).used_drafter(console) is None
    assert said.getvalue() == "elsewhere decodes plainly: --drafter DIR names a drafter made for it\n"
    with pytest.raises(ValueError, match="--speculation chain needs --drafter DIR: a drafter made for elsewhere"):
        SpeculationOptions(checkpoint=other, speculation="chain").used_drafter(console)


def test_profile_lists_its_comparison(capsys):
    assert profile.parse(profile.Options, ["diff", "a", "b"], None, None).diff == profile.Compare(Path("a"), Path("b"))
    with pytest.raises(SystemExit):
        profile.run(["--help"])
    assert "diff" in capsys.readouterr().out.rpartition("subcommands")[2]
