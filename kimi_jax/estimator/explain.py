"""Where each number behind an estimate comes from, and how much the answer moves if it is 20 % off."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kimi_jax.estimator.scenario import Scenario, default_acceptance
from kimi_jax.estimator.step import estimate
from kimi_jax.ledger import routing
from kimi_jax.ledger.constants import Constants, LinkConstants

CHANGE = 0.20

_GPU_UNITS = {
    "hbm_bytes_per_s": "B/s", "hbm_bytes": "B", "bf16_flops_per_s": "FLOP/s", "fp8_flops_per_s": "FLOP/s",
    "fp4_flops_per_s": "FLOP/s", "local_link": "B/s one way", "network_link": "B/s one way",
}  # fmt: skip


@dataclass(frozen=True)
class Effect:
    """One input of an estimate.

    lower, higher: relative change of tokens/s for a user when the input is 20 % smaller or larger (rates and shares
    stop at 1).
    """

    name: str
    value: float
    unit: str
    kind: str
    source: str
    lower: float
    higher: float

    @property
    def swing(self) -> float:
        """The larger of the two changes."""
        return max(abs(self.lower), abs(self.higher))


@dataclass(frozen=True)
class _Input:
    name: str
    value: float
    unit: str
    kind: str
    source: str
    change: Callable[[Scenario, float], Scenario]


def _set_constant(name: str) -> Callable[[Scenario, float], Scenario]:
    def change(s: Scenario, value: float) -> Scenario:
        constants = dataclasses.replace(s.constants, **{name: value})
        changed = dataclasses.replace(s, constants=constants)
        if name in ("zipf_offset", "tree_diversity") and s.routing.name.startswith("zipf"):
            skew = routing.zipf(s.routing.num_experts, s.routing.top_k, constants.zipf_offset, constants.tree_diversity)
            changed = dataclasses.replace(changed, routing=skew)
        if name in ("hit_rate", "unsure_rate", "sibling_share", "after_sibling") and s.budget:
            acceptance = default_acceptance(s.drafter.block_size, constants=constants)
            if s.acceptance == default_acceptance(s.drafter.block_size, constants=s.constants):
                changed = dataclasses.replace(changed, acceptance=acceptance)
        return changed

    return change


def _set_kernel(group: str, name: str) -> Callable[[Scenario, float], Scenario]:
    def change(s: Scenario, value: float) -> Scenario:
        piece = dataclasses.replace(getattr(s.kernels, group), **{name: value})
        return dataclasses.replace(s, kernels=dataclasses.replace(s.kernels, **{group: piece}))

    return change


def _set_gpu(name: str) -> Callable[[Scenario, float], Scenario]:
    def change(s: Scenario, value: float) -> Scenario:
        if name.endswith("_link"):
            link = dataclasses.replace(getattr(s.gpu, name), bytes_per_s=value)
            return dataclasses.replace(s, gpu=dataclasses.replace(s.gpu, **{name: link}))
        return dataclasses.replace(s, gpu=dataclasses.replace(s.gpu, **{name: value}))

    return change


def _set_link(name: str) -> Callable[[Scenario, float], Scenario]:
    def change(s: Scenario, value: float) -> Scenario:
        link = dataclasses.replace(s.link, **{name: value})
        return dataclasses.replace(s, link=link)

    return change


def _inputs(s: Scenario) -> Iterator[_Input]:
    for name, unit in _GPU_UNITS.items():
        value = getattr(s.gpu, name)
        number, source = (value.bytes_per_s, value.source) if name.endswith("_link") else (value, s.gpu.source)
        if number:
            yield _Input(f"gpu.{name}", number, unit, "data sheet", source, _set_gpu(name))
    for f in dataclasses.fields(Constants):
        m = f.metadata
        yield _Input(f.name, getattr(s.constants, f.name), m["unit"], m["kind"], m["source"], _set_constant(f.name))
    for group in ("attention", "experts", "overheads"):
        piece = getattr(s.kernels, group)
        for name, value in vars(piece).items():
            if isinstance(value, int | float):
                unit = "µs" if name.endswith("us") else "experts" if name == "extra_experts" else "share"
                change = _set_kernel(group, name)
                yield _Input(f"kernels.{group}.{name}", value, unit, piece.kind, piece.source, change)
    for f in dataclasses.fields(LinkConstants):
        value = getattr(s.link, f.name)
        if isinstance(value, int | float):
            unit = "µs" if f.name.endswith("_us") else "share"
            yield _Input(f"link.{f.name}", value, unit, "derived", s.link.source, _set_link(f.name))


def explain(s: Scenario, names: tuple[str, ...] = ()) -> list[Effect]:
    """What every constant behind a scenario is, its source, and what 20 % of it does; largest effect first.

    names: constants to explain, with or without their prefix; empty for all.

    Raises:
        ValueError: an unknown name; the message lists the nearest.
    """
    inputs = list(_inputs(s))
    if names:
        known = {i.name.split(".", 1)[-1]: i for i in inputs} | {i.name: i for i in inputs}
        for name in names:
            if name not in known:
                raise ValueError(f"no constant {name!r}: choose from {', '.join(i.name for i in inputs)}")
        inputs = [known[name] for name in names]
    base = estimate(s).tokens_per_s_per_user

    def relative(item: _Input, factor: float) -> float:
        value = item.value * factor
        if item.value <= 1 and (item.unit == "share" or item.unit.startswith(("of ", "chance"))):
            value = min(value, 0.999 if item.unit == "chance" or item.unit == "of misses" else 1.0)
        return estimate(item.change(s, value)).tokens_per_s_per_user / base - 1

    effects = [
        Effect(i.name, i.value, i.unit, i.kind, i.source, relative(i, 1 - CHANGE), relative(i, 1 + CHANGE))
        for i in inputs
    ]
    return sorted(effects, key=lambda e: -e.swing)
