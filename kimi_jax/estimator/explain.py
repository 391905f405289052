"""Where each number behind an estimate comes from, and how much the answer moves if it is 20 % off."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kimi_jax.estimator.scenario import Scenario, default_acceptance
from kimi_jax.estimator.step import estimate
from kimi_jax.ledger.constants import Constants
from kimi_jax.ledger.routing import zipf

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


def _inputs(s: Scenario) -> Iterator[tuple[Effect, tuple[str, ...]]]:
    """Everything that an estimate stands on, without its effect yet, and the fields that lead to it in the scenario."""

    def at(name: str, value: float, unit: str, kind: str, source: str, *path: str) -> tuple[Effect, tuple[str, ...]]:
        return Effect(name, value, unit, kind, source, 0.0, 0.0), path

    for name, unit in _GPU_UNITS.items():
        value = getattr(s.gpu, name)
        if name.endswith("_link"):
            yield at(f"gpu.{name}", value.bytes_per_s, unit, "data sheet", value.source, "gpu", name, "bytes_per_s")
        elif value:
            yield at(f"gpu.{name}", value, unit, "data sheet", s.gpu.source, "gpu", name)
    for f in dataclasses.fields(Constants):
        m = f.metadata
        yield at(f.name, getattr(s.constants, f.name), m["unit"], m["kind"], m["source"], "constants", f.name)
    for group in ("attention", "experts", "overheads"):
        piece = getattr(s.kernels, group)
        for name, value in vars(piece).items():
            if isinstance(value, int | float):
                unit = "µs" if name.endswith("us") else "experts" if name == "extra_experts" else "share"
                yield at(f"kernels.{group}.{name}", value, unit, piece.kind, piece.source, "kernels", group, name)
    for name, value in vars(s.link).items():
        if isinstance(value, int | float):
            unit = "µs" if name.endswith("_us") else "share"
            yield at(f"link.{name}", value, unit, "derived", s.link.source, "link", name)


def _replaced(whole: Any, path: Sequence[str], value: float) -> Any:
    """A dataclass with the field that a path of names leads to set anew."""
    first, *rest = path
    return replace(whole, **{first: _replaced(getattr(whole, first), rest, value) if rest else value})


def _changed(s: Scenario, path: Sequence[str], value: float) -> Scenario:
    """The scenario with another input, and what was made from it made again."""
    changed, name = _replaced(s, path, value), path[-1]
    if name in ("zipf_offset", "tree_diversity") and s.routing.name.startswith("zipf"):
        c = changed.constants
        changed = replace(
            changed, routing=zipf(s.routing.num_experts, s.routing.top_k, c.zipf_offset, c.tree_diversity)
        )
    if name in ("hit_rate", "unsure_rate", "sibling_share", "after_sibling") and s.budget:
        before, after = (default_acceptance(s.drafter.block_size, constants=x.constants) for x in (s, changed))
        changed = replace(changed, acceptance=after) if s.acceptance == before else changed
    return changed


def explain(s: Scenario, names: tuple[str, ...] = ()) -> list[Effect]:
    """What every constant behind a scenario is, its source, and what 20 % of it does; largest effect first.

    names: constants to explain, with or without their prefix; empty for all.

    Raises:
        ValueError: an unknown name; the message lists the nearest.
    """
    inputs = {effect.name: (effect, path) for effect, path in _inputs(s)}
    known = {name.split(".", 1)[-1]: name for name in inputs} | {name: name for name in inputs}
    for name in names:
        if name not in known:
            raise ValueError(f"no constant {name!r}: choose from {', '.join(inputs)}")
    base = estimate(s).tokens_per_s_per_user

    def relative(item: Effect, path: Sequence[str], factor: float) -> float:
        value = item.value * factor
        if item.value <= 1 and (item.unit == "share" or item.unit.startswith(("of ", "chance"))):
            value = min(value, 0.999 if item.unit == "chance" or item.unit == "of misses" else 1.0)
        return estimate(_changed(s, path, value)).tokens_per_s_per_user / base - 1

    effects = [
        replace(item, lower=relative(item, path, 1 - CHANGE), higher=relative(item, path, 1 + CHANGE))
        for item, path in (inputs[known[name]] for name in names or inputs)
    ]
    return sorted(effects, key=lambda e: -e.swing)
