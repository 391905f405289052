"""docs/cluster_scaling.md and docs/estimator.md, written from the model: texts beside this file, with their figures."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from kimi_jax.estimator import search
from kimi_jax.estimator.acceptance import rate_for_length
from kimi_jax.estimator.explain import explain
from kimi_jax.estimator.kernels import ATTENTION, EXPERTS, OVERHEADS, kernels
from kimi_jax.estimator.report import number, percent
from kimi_jax.estimator.scenario import Prefill, Scenario, default_acceptance, make_scenario
from kimi_jax.estimator.search import Family
from kimi_jax.estimator.step import Estimate, estimate
from kimi_jax.estimator.study import original, published
from kimi_jax.ledger.constants import LINKS, Constants
from kimi_jax.ledger.models import k26
from kimi_jax.ledger.rates import Network, all_reduce_algorithms
from kimi_jax.ledger.routing import uniform
from meshes import Layout, LayoutError, Preset, expert_slots, gpu, preset

COMMAND = "uv run scripts/estimate.py docs"
CONTEXT = 8192
PROMPTS = Prefill(8192, 1024)
LOADS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
SPEEDS = (50, 75, 100, 150, 200, 250, 300)
ACCEPTED = (2.3, 3.7, 4.86)
"""Tokens of a round with a chain of a block of 8: the one public run on K2.6, then MT-Bench and the mean of K2.5."""
BUDGETS = (0, 7, 12, 16, 32, 64)
HGX, NVL = "b300", "gb300"
MACHINES: tuple[tuple[Family, int], ...] = (
    ("hgx", 8), ("hgx", 16), ("hgx", 32), ("hgx", 40), ("hgx", 72), ("nvl", 8), ("nvl", 16), ("nvl", 36), ("nvl", 72),
)  # fmt: skip


def _scenario(machine: Preset, card: str, concurrency: int = 1, **options: Any) -> Scenario:
    return make_scenario(machine, gpu(card), concurrency=concurrency, context=CONTEXT, **options)


@functools.cache
def _best(family: Family, gpus: int, load: int) -> Estimate | None:
    machine = search.machine_of(family, gpus)
    return search.fastest(machine, _scenario(machine, HGX if family == "hgx" else NVL, load), BUDGETS)


def wall(s: Scenario, gpus: Sequence[int] = (8, 16, 32, 64)) -> list[Estimate]:
    """One stream with the experts' width split over ever more GPUs of an NVL72 rack, or of HGX nodes."""
    family: Family = "hgx" if s.preset.topology.gpus_per_domain == 8 else "nvl"
    results = []
    for size in gpus:
        layout = dataclasses.replace(s.preset.layout, dp=1, ep=1, tp=size, experts="width")
        machine = dataclasses.replace(search.machine_of(family, size), layout=layout)
        results.append(estimate(dataclasses.replace(s, preset=machine)))
    return results


def throughput(s: Scenario, loads: Sequence[int] = (1, 4, 16, 64, 256, 1024, 4096)) -> dict[str, list[Estimate]]:
    """Best layouts of 72 HGX GPUs and of a rack at growing load."""
    lines: dict[str, list[Estimate]] = {}
    families: tuple[tuple[Family, str], ...] = (("hgx", HGX), ("nvl", NVL))
    for family, card in families:
        machine = search.machine_of(family, 72)
        at = dataclasses.replace(s, preset=machine, gpu=gpu(card), kernels=kernels(s.kernels.name, card))
        found = []
        for load in loads:
            fitting = search.candidates(machine, dataclasses.replace(at, concurrency=load), BUDGETS)
            found += [max(fitting, key=lambda e: e.tokens_per_s)] if fitting else []
        lines[f"{machine.topology.num_gpus} × {card}"] = found
    return lines


def budget_scenarios(s: Scenario) -> dict[str, Scenario]:
    """The scenario's layout at 1, 8 and 64 requests."""
    return {f"concurrency {load}": dataclasses.replace(s, concurrency=load) for load in (1, 8, 64)}


def document(name: str) -> str:
    """One of the documents as Markdown, by the name of its file."""
    values = {key: value for section in SECTIONS[name] for key, value in section().items()}
    text = resources.files(__package__).joinpath(name).read_text()
    return text.format_map({"command": COMMAND, "context": CONTEXT} | values)


def _rows(rows: Iterable[Iterable[str]]) -> str:
    """Lines of a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _speed(e: Estimate | None) -> str:
    return number(e.tokens_per_s_per_user) if e else "–"


def _name(family: Family, gpus: int) -> str:
    return f"{gpus} × {HGX if family == 'hgx' else NVL} {family.upper()}"


@functools.cache
def points(
    family: Family, library: str = "public", prompts: bool = False, accepted: float | None = None
) -> list[Estimate]:
    """What 72 GPUs of a family can be run as."""
    machine = search.machine_of(family, 72)
    rates = None if accepted is None else default_acceptance(8, rate_for_length(accepted, 8))
    s = _scenario(
        machine, HGX if family == "hgx" else NVL, kernel_library=library, prefill=PROMPTS if prompts else None,
        acceptance=rates,
    )  # fmt: skip
    return search.operating_points(machine, s, loads=LOADS)


def _lead(speed: float, **options: Any) -> float | None:
    """Tokens/s for a GPU of a rack over those of HGX nodes, while every user has a speed."""
    hgx, nvl = (search.at_speed(points(family, **options), speed) for family in _FAMILIES)
    return nvl.tokens_per_s_per_gpu / hgx.tokens_per_s_per_gpu if hgx and nvl else None


_FAMILIES: tuple[Family, Family] = ("hgx", "nvl")


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f} ×"


def _verdict() -> dict[str, Any]:
    node, rack = _best("hgx", 8, 1), _best("nvl", 72, 1)
    assert node is not None
    assert rack is not None
    ranges = {accepted: default_acceptance(8, rate_for_length(accepted, 8)) for accepted in ACCEPTED}
    one = [search.best_budget(dataclasses.replace(node.scenario, acceptance=rates)) for rates in ranges.values()]
    leads = {accepted: _lead(100, accepted=accepted) for accepted in ACCEPTED[:-1]}
    return {
        "node": _speed(node), "rack": _speed(rack), "gain": f"{100 * (_ratio(rack, node) - 1):+.0f} %",
        "ranges": ", ".join(f"{_speed(e)} at {a:.1f}" for a, e in zip(ACCEPTED, one, strict=True)),
        "lead_50": _times(_lead(50)), "lead_100": _times(_lead(100)), "lead_200": _times(_lead(200)),
        "program_100": _times(_lead(100, library="program")), "prompts_50": _times(_lead(50, prompts=True)),
        "prompts_100": _times(_lead(100, prompts=True)),
        "leads": ", ".join(f"{_times(lead)} at {accepted:.1f}" for accepted, lead in leads.items()),
        "band": 100 * search.ERROR_BAND["wide-ep"],
        "low": _tree_gain("hgx", 8, {"tp": 8}, 1),
        "high": _tree_gain("hgx", 8, {"ep": 8, "tp": 1}, 2048),
        "wide_tree": _tree_gain("nvl", 72, {"dp": 1, "ep": 1, "tp": 64}, 1),
    }  # fmt: skip


def _ratio(left: Estimate, right: Estimate) -> float:
    return left.tokens_per_s_per_user / right.tokens_per_s_per_user


def _equal_speed() -> dict[str, Any]:
    rows = []
    for speed in SPEEDS:
        cells, found = [f"{speed}"], [search.at_speed(points(family), speed) for family in _FAMILIES]
        for e in found:
            if e is None:
                cells += ["–", "", "", ""]
            else:
                layout = search.describe(e.scenario.preset.layout)
                cells += [_three(e.tokens_per_s_per_gpu), f"{e.scenario.concurrency:,}", layout, str(e.scenario.budget)]
        ways = ({}, {"library": "program"}, {"prompts": True})
        rows.append([*cells, *(_times(_lead(speed, **options)) for options in ways)])
    return {"equal_speed": _rows(rows)}


def _three(value: float) -> str:
    """Three significant digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _fill() -> dict[str, Any]:
    """Requests at which experts over all 72 GPUs overtake tp 8 replicas, by draft nodes of full compiled row counts."""
    rack = search.machine_of("nvl", 72)
    wide_layouts = (Layout(ep=72, exchange=name) for name in ("allgather", "alltoall"))
    layouts = [Layout(dp=9, tp=8, experts="width"), *wide_layouts]
    rows = []
    for budget in (0, 7, 15, 23):
        for load in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512):
            replicas, *wide = (
                estimate(_scenario(rack.with_layout(layout), NVL, load, budget=budget)).tokens_per_s_per_user
                for layout in layouts
            )
            if max(wide) > replicas:
                rows.append((str(budget), str(budget + 1), f"{load:,}", _three(replicas), _three(max(wide))))
                break
    return {"fill": _rows(rows), "fill_plain": rows[0][2], "fill_tree": rows[1][2]}


def _network() -> dict[str, Any]:
    """One stream over one node and over two, by draft nodes: where InfiniBand's all-reduces eat what experts gain."""
    rows = []
    for budget in (0, 7, 16, 32, 64):
        node = estimate(_scenario(search.machine_of("hgx", 8).with_layout(_WIDTH_8), HGX, budget=budget))
        pair = search.machine_of("hgx", 16).with_layout(dataclasses.replace(_WIDTH_8, tp=16))
        two, fast = (estimate(_scenario(pair, HGX, budget=budget, hierarchical=way)) for way in (False, True))
        gained = node.parts["experts"].ms - two.parts["experts"].ms
        lost = [e.parts["reductions"].ms - node.parts["reductions"].ms for e in (two, fast)]
        rows.append((str(budget), *(f"{ms:.1f}" for ms in (node.step_ms, gained, *lost, two.step_ms, fast.step_ms))))
    return {"network": _rows(rows)}


_WIDTH_8 = Layout(tp=8, experts="width")


def _one_stream() -> dict[str, Any]:
    def row(family: Family, gpus: int) -> list[str]:
        e = _best(family, gpus, 1)
        assert e is not None
        return [
            _name(family, gpus), search.describe(e.scenario.preset.layout), str(e.scenario.budget),
            f"{e.acceptance_length:.2f}", f"{e.step_ms:.1f}", f"{e.limit_ms:.1f} ({e.limit_resource})",
            percent(e.limit_ms, e.step_ms), _speed(e), e.bottleneck,
        ]  # fmt: skip

    results = wall(_scenario(search.machine_of("nvl", 8), NVL, budget=16))
    names = [name for name in results[0].parts if max(e.parts[name].ms for e in results) >= 0.05]
    steps = [[name, *(f"{e.parts[name].ms:.2f}" for e in results)] for name in names]
    steps.append(["**step**", *(f"**{e.step_ms:.2f}**" for e in results)])
    steps.append(["limit", *(f"{e.limit_ms:.2f}" for e in results)])
    card, first, last = gpu(NVL), results[0], results[-1]
    rack = Network(card, search.machine_of("nvl", 72).topology, Constants(), LINKS[card.local_link.name])
    by_size = {n: {t.algorithm: t.us for t in all_reduce_algorithms(rack, n, 9 * 7168 * 2)} for n in (4, 8, 16, 32, 64)}
    return {
        "machines": _rows(row(*machine) for machine in MACHINES), "wall": _rows(steps),
        "all_reduces": _rows([name, *(f"{times[name]:.1f}" for times in by_size.values())] for name in by_size[8]),
        "first_ms": first.parts["experts"].ms, "last_ms": last.parts["experts"].ms,
        "rest_ms": last.step_ms - last.parts["experts"].ms,
    }  # fmt: skip


def _trees() -> dict[str, Any]:
    s = _scenario(search.machine_of("hgx", 8), HGX)
    routing = uniform(s.model.n_routed_experts, s.model.num_experts_per_tok)
    places: tuple[tuple[Family, int, dict[str, int]], ...] = (
        ("hgx", 8, {"tp": 8}), ("hgx", 8, {"ep": 8, "tp": 1}), ("nvl", 72, {"dp": 1, "ep": 1, "tp": 64}),
        ("nvl", 72, {"ep": 9}), ("nvl", 72, {"ep": 72, "tp": 1}),
    )  # fmt: skip
    rows = []
    for family, gpus, axes in places:
        for load in (1, 64, 2048):
            g = _tree_gain(family, gpus, axes, load)
            if g.by_budget[0].memory.fits:
                speeds = [_speed(g.by_budget[b]) for b in (0, 7, 16, 32)]
                layout = g.by_budget[0].scenario.preset.layout
                rows.append([f"{_name(family, gpus)}, {layout}", f"{load:,}", *speeds, str(g.budget), f"{g.gain:.2f}×"])
    return {
        "hit_rate": Constants().hit_rate, "chain": s.acceptance.chain_length(), "trees": _rows(rows),
        "lengths": ", ".join(f"{b}: {s.acceptance.length(b):.2f}" for b in (7, 8, 12, 16, 32, 64)),
        "distinct": ", ".join(f"{m}: {routing.distinct_experts(m):.1f}" for m in (1, 9, 17, 33, 65, 256)),
        "experts_of_9": routing.distinct_experts(9), "experts_of_33": routing.distinct_experts(33),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _TreeGain:
    by_budget: dict[int, Estimate]

    @property
    def budget(self) -> int:
        return max(self.by_budget, key=lambda b: self.by_budget[b].tokens_per_s_per_user)

    @property
    def gain(self) -> float:
        return self.by_budget[self.budget].tokens_per_s_per_user / self.by_budget[0].tokens_per_s_per_user


def _tree_gain(family: Family, gpus: int, axes: dict[str, int], load: int) -> _TreeGain:
    machine = search.machine_of(family, gpus).with_axes(**axes)
    if machine.layout.ep > 8:
        machine = machine.with_options(exchange="alltoall")
    s = _scenario(machine, HGX if family == "hgx" else NVL, load)
    return _TreeGain({b: estimate(dataclasses.replace(s, budget=b)) for b in search.BUDGETS})


def _original() -> dict[str, str]:
    rows = (
        (f.group, f.name, f"{f.published:,g} {f.unit}", number(f.reproduced), f"{100 * f.error:+.1f} %",
         number(f.corrected), f.note)
        for f in original.figures()
    )  # fmt: skip
    return {"original": _rows(rows)}


def _claims() -> dict[str, Any]:
    """Figures behind the claims of the original analysis, from the model's own configuration."""
    # These import jax, for which `--help` should not wait.
    from kimi_jax.ledger import layout_rules
    from kimi_jax.ledger.step import Step, cache_bytes, ledger
    from kimi_jax.ledger.weights import model_held

    model, refusal = k26(), ""
    one_token = Step(model, Layout(), requests=1, rows=1, context=1)
    held = {part: need.weights for part, need in ledger(one_token).items()}
    layers, total = model.num_moe_layers, sum(held.values())
    experts = model_held(model, Layout(), one_token.dtype, model.n_routed_experts)["experts"]
    expert_bytes, row = experts.bytes / layers / model.n_routed_experts, model.hidden_size * 2
    try:
        layout_rules.check(model, preset("nvl72").with_axes(ep=1, tp=72).layout)
    except LayoutError as error:
        refusal = str(error)
    return {
        "model": model, "layers": layers, "reductions": 2 * model.num_hidden_layers, "exchanges": 2 * layers,
        "packed_mb": experts.values / layers / model.n_routed_experts / 2e6, "expert_mb": expert_bytes / 1e6,
        "packed_gb": experts.values / 2e9, "experts_gb": held["experts"] / 1e9, "all_gb": total / 1e9,
        "rest_gb": (total - held["experts"]) / 1e9, "dense_gb": (total - held["experts"] - held["embedding"]) / 1e9,
        "active_gb": layers * model.num_experts_per_tok * expert_bytes / 1e9, "cached": cache_bytes(one_token),
        "row": row, "rows_mb": 256 * row / 1e6, "copies_mb": 8 * 256 * row / 1e6, "refusal": refusal,
        "slots_36": expert_slots(384, 36), "slots_72": expert_slots(384, 72),
        "fullest_ms": 6 * expert_bytes * layers / 8e12 * 1e3, "rate": rate_for_length(14, 16),
    }  # fmt: skip


def _sureness() -> dict[str, str]:
    machine = search.machine_of("nvl", 72).with_options(ep=9, exchange="alltoall")
    effects = explain(_scenario(machine, NVL, 64, budget=8))
    constants = (
        (f"`{e.name}`", f"{e.value:.4g} {e.unit}", e.kind, e.source, f"{100 * e.lower:+.1f} / {100 * e.higher:+.1f} %")
        for e in effects
        if e.swing >= 0.0005
    )
    libraries = []
    for group, pieces in (("attention", ATTENTION), ("experts", EXPERTS), ("overheads", OVERHEADS)):
        for key, piece in pieces.items():
            values = ", ".join(f"{f} {v:g}" for f, v in vars(piece).items() if isinstance(v, int | float))
            name, *of = (key,) if isinstance(key, str) else key
            libraries.append((name, group, ", ".join(of), values, piece.kind, piece.source))
    without_effect = ", ".join(sorted(f"`{e.name}`" for e in effects if e.swing < 0.0005))
    return {"constants": _rows(constants), "without_effect": without_effect, "kernels": _rows(libraries)}


def _validation() -> dict[str, Any]:
    def rows(role: str) -> str:
        return _rows(
            (name, number(p.published), number(p.predicted), f"{100 * p.error:+.0f} %", p.source)
            for name, p, _ in published.compared(role)
        )

    bands = {name.replace("-", "_"): 100 * band for name, band in search.ERROR_BAND.items()}
    return bands | {"overlap": published.OVERLAP, "calibration": rows("calibration"), "held_out": rows("held-out")}


SECTIONS = {
    "cluster_scaling.md": (_verdict, _equal_speed, _fill, _trees, _claims),
    "estimator.md": (_one_stream, _network, _original, _sureness, _validation),
}
"""What the documents are made of."""
