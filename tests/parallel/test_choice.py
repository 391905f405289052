"""One rule says what `auto` takes: the decoder, the list of messages, the profiler and the estimator agree."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.decoding.kernels import picks
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.step import estimate
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.ledger.step import ledger
from kimi_jax.parallel.placement import even_placement
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.tables import exchange_note
from meshes import PRESETS, gpu, preset
from meshes.devices import build_mesh


def test_auto_is_every_presets_default():
    assert {machine.layout.exchange for machine in PRESETS.values()} == {"auto"}


@pytest.mark.parametrize(
    ("mesh", "axes", "requests", "budget", "name"),
    [
        ("nvl72", {}, 9, 0, "allgather"),
        ("nvl72", {}, 64, 16, "alltoall"),
        ("nvl72", {"dp": 1, "ep": 72, "tp": 1}, 72, 16, "allgather"),
        ("nvl72", {"dp": 1, "ep": 72, "tp": 1}, 576, 16, "alltoall"),
        ("hgx-ib-16", {}, 2, 15, "allgather"),
        ("hgx-ib-16", {}, 64, 15, "hierarchical"),
        ("hgx-ib-16", {"dp": 1, "ep": 16, "tp": 1}, 64, 15, "allgather"),
        ("hgx-ib-72", {}, 64, 15, "hierarchical"),
        ("hgx-ib-72", {}, 1024, 15, "alltoall"),
    ],
)
def test_all_agree(mesh, axes, requests, budget, name):
    machine, config = preset(mesh).with_axes(**axes), k26()
    layout, rows = machine.layout, budget + 1
    card = machine.gpu_names[0]

    case = Case(config, machine, card, requests, context=8192, budget=budget, drafter=kimi_drafter())
    assert case.exchange == name
    placement = even_placement(config.n_routed_experts, layout.expert_ranks)
    pick = picks(
        config, placement, layout, build_mesh(machine, jax.devices()), jnp.float32,
        requests=requests, rows=rows, capacity=128,
    )[-1]  # fmt: skip
    assert (pick.operation, pick.implementation) == ("exchange", name)
    kinds = {message.kind for message in ledger(case.step)["exchange"].messages}
    assert kinds == ({"all-to-all"} if name == "alltoall" else {"all-gather", "reduce-scatter"})

    scenario = make_scenario(machine, gpu(card), concurrency=requests, context=8192, budget=budget)
    estimated = estimate(scenario)
    assert estimated.scenario.preset.layout == dataclasses.replace(layout, exchange=name)
    named = dataclasses.replace(scenario, preset=machine.with_layout(dataclasses.replace(layout, exchange=name)))
    assert estimated.parts == estimate(named).parts


def test_the_profilers_note_says_what_is_not_counted():
    busy = Case(k26(), preset("nvl72"), "gb300", 64, context=8192, drafter=kimi_drafter())
    assert exchange_note(busy).startswith("Exchange: alltoall for 128 rows a device, counted as where its buffers hold")
    assert exchange_note(dataclasses.replace(busy, requests=9, budget=0)) == "Exchange: allgather for 1 row a device."
    assert exchange_note(dataclasses.replace(busy, preset=preset("local"))) == ""
