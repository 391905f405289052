"""What a compiled program holds, moves and waits for on one device, by part of the model, beside the least it must.

The floor of a part is the larger of its necessary bytes at the card's bandwidth and its operations at the card's
bfloat16 peak, and the bytes of its messages at the link's. Nothing here is a measured time.
"""

import dataclasses
import math
from collections import Counter
from typing import Any

from kimi_jax.ledger.constants import Constants
from kimi_jax.ledger.launches import Launches, modelled
from kimi_jax.ledger.part import PARTS
from kimi_jax.ledger.rates import Network, transfer
from kimi_jax.ledger.step import Work, ledger
from kimi_jax.parallel.sharding import cache_multiple, rules
from kimi_jax.profiling import traffic
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.compile import Compiled, held_arrays
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.messages import Collective, collectives
from kimi_jax.profiling.placed import Placed, read_whole, state_bytes, weight_bytes, weight_part
from meshes.hardware import GPU, gpu


@dataclasses.dataclass(frozen=True)
class Holdings:
    """Bytes on one device, and what else would fit."""

    weights: dict[str, int]
    cache: int
    context: int
    """The drafter's keys and values."""
    other_state: int
    temporaries: int
    reserve: float
    """Kept free for driver, communication buffers and fragmentation; 0 without a card."""
    card: float | None
    """None where no GPU is in play, as are the three figures that follow from it."""
    most_requests: int | None
    """In the whole machine, at this context."""
    most_context: int | None
    """At this batch; 0 where not even the weights fit."""

    @property
    def total(self) -> float:
        """Bytes of all that a device holds, the reserve included."""
        state = self.cache + self.context + self.other_state
        return sum(self.weights.values()) + state + self.temporaries + self.reserve

    @property
    def free(self) -> float | None:
        """What is left of the card; negative where the program does not fit."""
        return None if self.card is None else self.card - self.total

    @property
    def verdict(self) -> str:
        """Whether it fits, and by how much, in one sentence."""
        if self.card is None or self.free is None:
            return f"Holds {self.total / 1e6:,.1f} MB on each device."
        if self.free >= 0:
            return f"Fits with {self.free / 1e9:.1f} GB free."
        fixed = sum(self.weights.values()) + self.reserve
        if fixed > self.card:
            return (
                f"Does not fit: {-self.free / 1e9:.1f} GB too much, and the weights with the reserve alone are "
                f"{(fixed - self.card) / 1e9:.1f} GB over the card. More ep or tp ranks would share them."
            )
        most = f"at most {self.most_requests} requests at this context"
        if self.most_context:
            most += f", or {self.most_context} tokens at this batch"
        return f"Does not fit: {-self.free / 1e9:.1f} GB too much; {most}."


@dataclasses.dataclass(frozen=True)
class PartReport:
    """One part of one execution on one device."""

    part: str
    need: Work
    """The least that it must read and compute, by the ledger."""
    weight_bytes_read: int
    """Of weights, by the compiled instructions; kernels are taken to read their operands whole."""
    weight_bytes_held: int
    """Of the weights that the program needs: a prefill reads a few of the drafter's."""
    cache_bytes_read: int
    context_bytes_read: int
    """Of the drafter's keys and values."""
    moved_bytes: int
    """Of arguments and activations that the compiled instructions read and write. Pallas kernels count with what they
    read of arguments, those of the routed experts with what routing is expected to touch."""
    collectives: tuple[Collective, ...]
    messages: int
    link_bytes: float
    """Least that a device must send over a link, for all messages."""
    kernels: tuple[traffic.Kernel, ...]
    latency_us: float | None
    """Fixed cost of the messages, from the estimator's published measurements: an estimate. Like the three times below
    it is None where no GPU is in play."""
    memory_us: float | None
    compute_us: float | None
    link_us: float | None
    launches: Launches
    modelled_us: float | None
    """What the launches, bytes, messages and kernels of the compiled program should take; see `ledger.launches`."""

    @property
    def floor_us(self) -> float | None:
        """Least time."""
        if self.memory_us is None or self.compute_us is None or self.link_us is None:
            return None
        return max(self.memory_us, self.compute_us) + self.link_us


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything about one compiled program."""

    case: Case
    parts: tuple[PartReport, ...]
    holdings: Holdings
    materialised: tuple[traffic.Materialised, ...]
    host_transfers: tuple[str, ...]
    custom_calls: dict[str, int]
    touched_experts: float
    compiled: Compiled
    whole: Holdings | None = None
    """What the whole model would hold, where some of its layers were compiled; temporaries are those of the program."""
    whole_layers: int = 0
    """Layers of the whole model; 0 where it was compiled."""

    @property
    def floor_us(self) -> float | None:
        """Of all parts, one after the other; None without a card."""
        floors = [part.floor_us for part in self.parts if part.floor_us is not None]
        return sum(floors) if floors else None

    @property
    def launches(self) -> Launches:
        """Of all parts."""
        each = [dataclasses.astuple(part.launches) for part in self.parts]
        return Launches(*map(sum, zip(*each, strict=True)))

    @property
    def modelled_us(self) -> float | None:
        """Of all parts, one after the other; None without a card."""
        times = [part.modelled_us for part in self.parts if part.modelled_us is not None]
        return sum(times) if times else None

    @property
    def read_ratio(self) -> float:
        """Bytes of dense weights that compiled instructions read over those there are: 1 is once each.

        The head is needed twice where there is a drafter. Routed experts are left out: their kernel reads what
        routing touches.
        """
        read = sum(part.weight_bytes_read for part in self.parts if part.part != "experts")
        held = {part.part: part.weight_bytes_held for part in self.parts if part.part != "experts"}
        twice = held.get("head", 0) if held.get("drafter") and self.case.program != "prefill" else 0
        return read / max(1, sum(held.values()) + twice)

    @property
    def necessary_bytes(self) -> float:
        """What one execution must move on one device."""
        return sum(part.need.hbm_bytes for part in self.parts)

    @property
    def moved_ratio(self) -> float:
        """Bytes that the compiled program moves over those it must: 1 is everything once and nothing in between."""
        return sum(part.moved_bytes for part in self.parts) / self.necessary_bytes

    @property
    def verdict(self) -> str:
        """Whether the whole model fits, and by how much, in one sentence; a part of its layers is said to be one."""
        if self.whole is None:
            return self.holdings.verdict
        layers, verdict = self.case.config.num_hidden_layers, self.whole.verdict
        return (
            f"All {self.whole_layers} layers: {verdict[0].lower()}{verdict[1:]} "
            f"Compiled were {layers}, which hold {self.holdings.total / 1e9:.1f} of {self.whole.total / 1e9:.1f} GB."
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; bytes and µs."""
        case, layout = self.case, self.case.preset.layout
        return {
            "program": case.program,
            "mesh": case.preset.name,
            "layout": layout.axis_sizes | {"experts": layout.experts, "exchange": case.exchange},
            "gpu": case.gpu,
            "layers": case.config.num_hidden_layers,
            "requests": case.requests,
            "requests_per_device_group": case.device_requests,
            "rows_per_request": case.rows,
            "context": case.context,
            "budget": case.budget,
            "memory": _as_dict(self.holdings) | {"xla_peak": self.compiled.peak},
            "whole_model": self.whole and {"layers": self.whole_layers, "memory": _as_dict(self.whole)},
            "verdict": self.verdict,
            "parts": [dataclasses.asdict(part) | {"floor_us": part.floor_us} for part in self.parts],
            "floor_us": self.floor_us,
            "modelled_us": self.modelled_us,
            "launches": dataclasses.asdict(self.launches),
            "necessary_bytes": self.necessary_bytes,
            "moved_ratio": self.moved_ratio,
            "dense_weight_read_ratio": self.read_ratio,
            "touched_experts_per_rank": self.touched_experts,
            "materialised": [dataclasses.asdict(found) for found in self.materialised],
            "host_transfers": list(self.host_transfers),
            "custom_calls": self.custom_calls,
            "assembled": [dataclasses.asdict(kernel) for kernel in self.compiled.assembled],
            **{name: getattr(self.compiled, name) for name in ("lower_seconds", "compile_seconds", "host_bytes")},
        }


def _as_dict(holdings: Holdings) -> dict[str, Any]:
    return dataclasses.asdict(holdings) | {"total": holdings.total, "free": holdings.free}


def make_report(compiled: Compiled, whole: Case | None = None) -> Report:
    """Reads a compiled program.

    Args:
      compiled: the program.
      whole: the case of the whole model, where the program has some of its layers: what it would hold is counted.
    """
    case, module = compiled.case, Module(compiled.text)
    card = gpu(case.gpu or case.preset.gpu_names[0])  # without a card: only for the route of a message
    timed = case.gpu is not None
    needed, held = ledger(case.step), weight_bytes(read_whole(case.program, compiled.weights))
    names = {array.name for array in compiled.weights}
    vectors = {array.name for array in compiled.weights if len(array.shape) == 1}
    read: Counter[tuple[str, str]] = Counter()
    moved: Counter[str] = Counter(traffic.intermediates(module))
    for (array, part), num_bytes in traffic.reads(module).items():
        kind = weight_part(array) if array in names else array.removeprefix("state.").split(".")[0]
        # XLA leaves the scope of what it merges from two operations, and reads norms in the products behind them.
        if kind in PARTS and (part == "other" or array in vectors):
            part = kind
        read[part, "weights" if array in names and kind != "embedding" else kind] += num_bytes
        if kind != "experts":
            moved[part] += num_bytes
    moved["experts"] += round(needed["experts"].total.hbm_bytes)
    sent, kernels = collectives(module, case.preset.layout.axis_sizes), traffic.kernels(module)
    network = Network.of(case.preset, card)
    started, times = traffic.launches(module), {}
    if timed:
        cached = {"attention": read["attention", "cache"], "experts": needed["experts"].total.hbm_bytes}
        dense = {part: moved[part] - cached.get(part, 0) for part in PARTS}
        times = modelled(case.step, case.preset, card, started, dense)
    parts = []
    for part in PARTS:
        messages = tuple(c for c in sent if c.part == part)
        transfers = [
            transfer(network, case.preset.span(*each.axes), each.message).times(each.count) for each in messages
        ]
        need = needed[part].total
        parts.append(
            PartReport(
                part=part,
                need=need,
                weight_bytes_read=read[part, "weights"],
                weight_bytes_held=held.get(part, 0),
                cache_bytes_read=read[part, "cache"],
                context_bytes_read=read[part, "context"],
                moved_bytes=moved[part],
                collectives=messages,
                messages=sum(message.count for message in messages),
                link_bytes=sum(t.local_bytes + t.network_bytes for t in transfers),
                latency_us=sum(t.latency_us for t in transfers) if timed else None,
                kernels=tuple(kernel for kernel in kernels if kernel.part == part),
                memory_us=1e6 * need.hbm_bytes / card.hbm_bytes_per_s if timed else None,
                compute_us=1e6 * need.flops / card.bf16_flops_per_s if timed else None,
                link_us=sum(t.local_bytes / network.local + t.network_bytes / network.remote for t in transfers)
                if timed
                else None,
                launches=started.get(part, Launches()),
                modelled_us=times.get(part),
            )
        )
    temporaries, found = compiled.temporaries, card if timed else None
    return Report(
        case=case,
        parts=tuple(parts),
        holdings=holdings(case, compiled.weights, compiled.state, temporaries, found),
        whole=None if whole is None else holdings(whole, *held_arrays(whole), temporaries, found),
        whole_layers=0 if whole is None else whole.config.num_hidden_layers,
        materialised=tuple(_with_part(found, names) for found in traffic.materialised(module)),
        host_transfers=tuple(traffic.host_transfers(module)),
        custom_calls=traffic.custom_calls(module),
        touched_experts=case.step.experts.experts,
        compiled=compiled,
    )


def _with_part(found: traffic.Materialised, weights: set[str]) -> traffic.Materialised:
    """A weight's own part for what has no scope left."""
    if found.part == "other" and found.array in weights:
        return dataclasses.replace(found, part=weight_part(found.array))
    return found


def holdings(
    case: Case, weights: tuple[Placed, ...], state: tuple[Placed, ...], temporaries: int, card: GPU | None
) -> Holdings:
    """What one device holds and how far batch and context could grow.

    Temporaries are taken to grow with the batch, and the cache with both.
    """
    held, kept = weight_bytes(weights), state_bytes(state)
    if card is None:
        return Holdings(held, kept["cache"], kept["context"], kept["other"], temporaries, 0.0, None, None, None)
    reserve = Constants().reserve_bytes
    free = card.hbm_bytes - reserve - sum(held.values())
    each = (sum(kept.values()) + temporaries) / case.device_requests
    most_requests = max(0, math.floor(free / each)) * case.preset.layout.groups
    multiple = cache_multiple(rules(case.preset.layout), case.preset.layout.axis_sizes)
    rest = free - kept["context"] - kept["other"] - temporaries
    positions = max(0, math.floor(rest / (kept["cache"] / case.capacity))) // multiple * multiple
    most_context = min(max(0, positions - case.depth - 1), case.config.max_position_embeddings)
    return Holdings(
        held, kept["cache"], kept["context"], kept["other"], temporaries, reserve, card.hbm_bytes,
        most_requests, most_context,
    )  # fmt: skip
