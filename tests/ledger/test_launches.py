"""Times of whole rounds from launches, bytes and messages, against an audit of compiled programs; nothing was timed.

The audit's launches of a layer were counted in XLA's thunks (of three layers less two), before rounds had 16 rows, one
decision on overflow and tiles for the rows that arrive. The program of then has to cost what the audit said of it.
"""

import dataclasses

import numpy as np
import pytest

from kimi_jax.ledger.launches import Launches, attention_us, experts_shape, experts_us, modelled, tiles_of
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.ledger.step import Step, ledger
from meshes import gpu, preset

# Kernels of one MoE layer by part, and of the whole drafter and tree; and what the kernels of XLA moved over what they
# must: split-k partials, pads, packs.
KERNELS = {
    "nvl72": {"attention": 12, "router": 5, "exchange": 11, "experts": 10, "shared_expert": 3, "reductions": 2},
    "hgx-ib-16": {"attention": 12, "router": 5, "exchange": 11, "experts": 66, "shared_expert": 3, "reductions": 2},
    "hgx-ib-8": {"attention": 12, "router": 5, "experts": 10, "shared_expert": 3, "reductions": 2},
}
OTHERS = {"drafter": 179, "tree": 150, "head": 5, "dense": 4}


@pytest.mark.parametrize(
    ("mesh", "card", "requests", "waits", "between"),
    [
        ("nvl72", "gb300", 64, 60, (18, 20)),
        ("hgx-ib-16", "h200", 64, 2 * 60, (65, 68)),
        ("hgx-ib-8", "h200", 1, 0, (12, 13)),
    ],
)
def test_the_audited_rounds(mesh, card, requests, waits, between):
    machine = preset(mesh)
    exchange = {"hgx-ib-16": "allgather"}.get(mesh)
    step = Step(k26(), machine.layout, requests, 17, 8192, kimi_drafter(), exchange=exchange)
    kernels = {part: 61 * count for part, count in KERNELS[mesh].items()} | OTHERS
    launches = {part: Launches(kernels=count) for part, count in kernels.items()}
    part = "exchange" if mesh == "nvl72" else "experts"
    launches[part] = dataclasses.replace(launches[part], host_waits=waits)
    weights = {p: n.work["weights"].hbm_bytes for p, n in ledger(step).items() if "weights" in n.work}
    dense = {part: 2 * count for part, count in weights.items() if part != "experts"}
    times = modelled(step, machine, gpu(card), launches, dense)
    total = sum(times.values())
    if mesh == "nvl72":  # tiles were those of the 396 rows that buffers have room for
        shape = experts_shape(step.config, step.layout, step.num_slots, step.device_rows)
        total += 60 * (experts_us(gpu(card), shape, tile_rows=16) - experts_us(gpu(card), shape))
    assert between[0] <= total / 1e3 <= between[1], times


def test_kernels_against_the_audits_figures():
    """Attention of Hopper and Blackwell at 8,192 positions, and experts of 17 rows on eight H200."""
    figures = {(8, 17, "gb300"): 43, (32, 17, "h200"): 208, (32, 16, "h200"): 122, (32, 33, "gb300"): 237}
    for (requests, rows, card), us in figures.items():
        assert attention_us(gpu(card), requests, 8 * rows, 8192) == pytest.approx(us, rel=0.1)
    layout = preset("hgx-ib-8").layout
    assert experts_us(gpu("h200"), experts_shape(k26(), layout, 384, 17)) == pytest.approx(87, rel=0.06)


def test_tiles_are_those_of_independent_choices():
    rng = np.random.default_rng(0)
    counts = rng.binomial(9792, 1 / 384, 200_000)
    for rows in (8, 16, 64):
        assert tiles_of(9792, 384, rows) == pytest.approx(np.ceil(counts / rows).mean(), rel=2e-3)
    assert tiles_of(8, 384, 16) == pytest.approx(1 - (1 - 1 / 384) ** 8)
