"""The whole model under routing that a mesh takes badly: logits of one device, whatever the layout and the exchange.

Routers are forced through their correction bias, which decides what is chosen and leaves the weights alone, so every
row's choice within what is left to it, and all arithmetic, are the model's own. 300 experts in layers of random
weights: a rank holds several, and ranks that do not divide them have empty slots.

Where the last expert chosen and the first left out score alike, rounding decides, on one device as on many: a row of
such a near tie and what follows in its request are not compared.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from kimi_jax.config import ModelConfig
from kimi_jax.decoding.loading import model_for
from kimi_jax.model.moe import Router
from kimi_jax.model.rows import causal_rows
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.counters import counting
from kimi_jax.parallel.placement import EMPTY, even_placement
from kimi_jax.parallel.sharding import REQUESTS, rules
from kimi_jax.parameters import bind, specs
from meshes.devices import build_mesh
from meshes.presets import AXES, Layout, preset
from tests.parallel.random_model import random_weights

TOLERANCE = 1e-4
NEAR_TIE = 1e-5
"""Between scores, which are between 0 and 1 and round at 1e-7."""
ROWS, REQUEST_COUNT, EXPERTS, TOP_K = 24, 72, 300, 4
CONFIG = dataclasses.replace(
    ModelConfig.from_json(Path(__file__).parents[1] / "data" / "tiny_random"),
    num_hidden_layers=3, num_attention_heads=64, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K,
)  # fmt: skip
"""One dense layer, two with experts. 64 heads, so that tp 64 has one each."""

HGX, NVL72 = preset("hgx-ib-16"), preset("nvl72")
MACHINES = {
    "local": preset("local"),
    "hgx-ib-16": HGX,
    "hgx-ib-16 ep 16": HGX.with_axes(dp=1, ep=16, tp=1),
    "hgx-ib-16 dp 2": HGX.with_axes(dp=2, ep=1, tp=8),
    "nvl36": preset("nvl36"),
    "nvl72": NVL72,
    "nvl72 ep 72": NVL72.with_axes(dp=1, ep=72, tp=1),
    "nvl72 dp 9": NVL72.with_axes(dp=9, ep=1, tp=8),
    "nvl72 tp 64": NVL72.with_axes(ep=1, tp=64),
}
KINDS = ("four experts", "one rank", "padded neighbours", "idle rank")


def exchanges(name: str) -> list[tuple[str, str]]:
    """How experts are split and what carries rows: all that differ on a machine. Width 256 has 8 groups for tp."""
    layout = MACHINES[name].layout
    backends = ["allgather", "alltoall"] if layout.ep > 1 else ["auto"]
    found = [("slots", backend) for backend in backends]
    if 1 < layout.tp <= CONFIG.moe_intermediate_size // CONFIG.quantization_group_size:
        found += [("width", backend) for backend in backends]
    return found


def left_to_routers(kind: str, layout: Layout) -> np.ndarray:
    """Experts that may be chosen, by where they lie."""
    held = np.array(even_placement(EXPERTS, layout.expert_ranks).slot_experts).reshape(layout.expert_ranks, -1)
    full = [rank[rank != EMPTY] for rank in held]
    if kind == "four experts":  # every row's choice is the same, on ranks as far apart as there are
        ranks = np.linspace(0, layout.expert_ranks - 1, TOP_K).round().astype(int)
        return np.array([full[rank][-1 - place] for place, rank in enumerate(ranks)])
    if kind == "one rank":  # the last one, which holds at least as many as a row chooses
        return full[-1]
    if kind == "padded neighbours":  # beside the first empty slot, as many on each side as a row chooses
        empty = np.flatnonzero(held.reshape(-1) == EMPTY)
        first = empty[0] if len(empty) else 0
        order = np.argsort(abs(np.arange(held.size) - first), kind="stable")
        near = held.reshape(-1)[order]
        return near[near != EMPTY][: 2 * TOP_K]
    return np.concatenate(full[1:]) if layout.expert_ranks > 1 else full[0]


@functools.cache
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (REQUEST_COUNT, ROWS)).astype(np.int32)


@functools.cache
def program(name: str, experts: str, exchange: str):
    """`run(bias, requests, padding)`: logits, gaps of scores, rows by layer and expert, exchanges that overflowed."""
    layout = dataclasses.replace(MACHINES[name].layout, experts=experts, exchange=exchange)
    machine = MACHINES[name].with_layout(layout)
    model, mesh, places = model_for(CONFIG, layout), build_mesh(machine, jax.devices()), rules(layout)

    def forward(parameters, bias, rows):
        layers = {
            index: layer | {"mlp": layer["mlp"] | {"gate": layer["mlp"]["gate"] | {"e_score_correction_bias": bias}}}
            if "gate" in layer["mlp"]
            else layer
            for index, layer in parameters["model"]["layers"].items()
        }
        bound = bind(model, parameters | {"model": parameters["model"] | {"layers": layers}})
        with counting(loads=True) as counted, pytest.MonkeyPatch.context() as patch:
            gaps: list[jax.Array] = []
            patch.setattr(Router, "__call__", telling_gaps(Router.__call__, gaps))
            hidden = bound.model(rows).hidden
        overflows = sum((overflow.astype(jnp.int32) for overflow in counted.overflows), jnp.int32(0))
        loads = jax.lax.psum(jnp.stack(counted.loads), ("dp", "ep"))
        logits = all_gather(bound.logits(hidden), "tp", dimension=2)
        gap = jnp.stack(gaps).min(0).reshape(logits.shape[:2])
        return logits, gap, loads, jax.lax.psum(overflows, AXES)

    weights = specs(model, places)
    mapped = jax.shard_map(
        forward, mesh=mesh, in_specs=(weights, PartitionSpec(), REQUESTS),
        out_specs=(REQUESTS, REQUESTS, PartitionSpec(), PartitionSpec()), check_vma=False,
    )  # fmt: skip
    compiled = jax.jit(mapped)
    place = functools.partial(jax.tree.map, lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)))
    parameters = place(random_weights(model), weights)

    def run(bias: np.ndarray, requests: int, padding: int = 0):
        counts = np.where(np.arange(requests) < requests - padding, ROWS, 0).astype(np.int32)
        rows = causal_rows(jnp.asarray(tokens()[:requests]), jnp.zeros(requests, jnp.int32), jnp.asarray(counts))
        with jax.default_matmul_precision("highest"):
            found = compiled(parameters, bias, rows)
        return jax.tree.map(np.asarray, found)

    return run


def telling_gaps(route: Callable, gaps: list[jax.Array]) -> Callable:
    """The router, which also appends by how much each row's last choice beats the best expert left out."""

    def routed(self, x):
        logits = jnp.einsum("rh,eh->re", x, self.weight[...], precision=jax.lax.Precision.HIGHEST)
        best, _ = jax.lax.top_k(jax.nn.sigmoid(logits) + self.e_score_correction_bias[...], TOP_K + 1)
        gaps.append(best[:, TOP_K - 1] - best[:, TOP_K])
        return route(self, x)

    return routed


@functools.cache
def one_device(allowed: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """All requests' logits, and which rows come before any near tie of their request."""
    logits, gaps, *_ = program("local", "slots", "auto")(bias_of(allowed), REQUEST_COUNT)
    return logits, np.logical_and.accumulate(gaps > NEAR_TIE, axis=1)


def bias_of(allowed: tuple[int, ...]) -> np.ndarray:
    """Scores are between 0 and 1."""
    bias = np.full(EXPERTS, -10, np.float32)
    bias[list(allowed)] = 0
    return bias


QUICK = ("hgx-ib-16", "slots", "alltoall")
SLOW = "one rank"  # which buffers do not hold
CASES = [(name, *split, kind) for name in MACHINES for split in exchanges(name) for kind in KINDS]


def marks_of(case: tuple[str, str, str, str]) -> list[pytest.MarkDecorator]:
    if case[:3] == QUICK:
        return []
    return [pytest.mark.slow if case[3] == SLOW else pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("name", "experts", "exchange", "kind"),
    [pytest.param(*case, id=", ".join(case), marks=marks_of(case)) for case in CASES],
)
def test_logits_are_those_of_one_device(name, experts, exchange, kind):
    layout = dataclasses.replace(MACHINES[name].layout, experts=experts)
    allowed = left_to_routers(kind, layout)
    assert TOP_K <= len(allowed) <= EXPERTS
    groups = layout.dp * layout.ep
    requests, padding = groups, int(groups > 1)  # one a device group, the last one's rows are padding
    logits, _, loads, overflows = program(name, experts, exchange)(bias_of(tuple(allowed)), requests, padding)
    real = requests - padding

    assert loads.sum(1).tolist() == [real * ROWS * TOP_K] * 2
    assert not np.delete(loads, allowed, axis=1).any(), "every row chose among what was left to it"
    if kind == "one rank" and exchange == "alltoall" and experts == "slots":
        assert overflows > 0, "all rows go to one rank, which buffers do not hold"
    expected, clear = (array[:real] for array in one_device(tuple(allowed)))
    assert clear.mean() > 0.8, "few rows are left out, of as few as eight requests"
    assert expected.std() > 0.1
    difference = float(abs(logits[:real] - expected)[clear].max())
    print(f"largest difference {difference:.1e}, {overflows} overflows, {clear.mean():.1%} of rows")
    assert difference < TOLERANCE
