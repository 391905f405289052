"""One step of decoding on one layout, the ledger times rates: time by part, physical limit, memory and throughput."""

import functools
import math
import operator
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from kimi_jax.estimator.memory import Memory, memory
from kimi_jax.estimator.scenario import Scenario
from kimi_jax.ledger import routing as routing_module
from kimi_jax.ledger.part import PARTS
from kimi_jax.ledger.rates import Network, transfer
from kimi_jax.ledger.routing import Routed
from kimi_jax.parallel.messages import as_sent
from meshes import GPU, expert_slots

if TYPE_CHECKING:
    from kimi_jax.config import ModelConfig
    from kimi_jax.ledger.step import Need, Work

TIMED = (*(part for part in PARTS if part not in ("embedding", "other")), "launch")
"""Parts of a step that take time, in the order of a table; `launch` is what no part's own work explains."""


@dataclass(frozen=True)
class Part:
    """Cost of one part on the busiest GPU. Figures are for one of its `count` layers, or one call a step.

    Times are µs: what is fixed, what memory, arithmetic and links take (at the rates kernels reach). Bytes and
    FLOPs are those that the limit is made of.
    """

    count: int = 1
    fixed_us: float = 0.0
    memory_us: float = 0.0
    compute_us: float = 0.0
    link_us: float = 0.0
    hbm_bytes: float = 0.0
    flops: float = 0.0
    flops_per_s: float = 1.0
    local_bytes: float = 0.0
    network_bytes: float = 0.0
    messages: float = 0
    note: str = ""

    @property
    def total_us(self) -> float:
        """Time of one layer or call."""
        return self.fixed_us + self.memory_us + self.compute_us + self.link_us

    @property
    def ms(self) -> float:
        """Time of all calls in a step."""
        return self.count * self.total_us / 1e3

    def resource_ms(self, gpu: GPU) -> dict[str, float]:
        """Least time that each resource needs for this part in a step, at the data-sheet rates."""
        n = 1e3 * self.count
        return {
            "HBM bandwidth": n * self.hbm_bytes / gpu.hbm_bytes_per_s,
            "arithmetic": n * self.flops / self.flops_per_s,
            gpu.local_link.name: n * self.local_bytes / gpu.local_link.bytes_per_s,
            gpu.network_link.name: n * self.network_bytes / gpu.network_link.bytes_per_s,
        }

    def limit_ms(self, gpu: GPU) -> float:
        """The slowest of the resources."""
        return max(self.resource_ms(gpu).values())

    @property
    def dominant(self) -> str:
        """What most of the time goes to."""
        times = {
            "latency": self.fixed_us, "HBM bandwidth": self.memory_us,
            "arithmetic": self.compute_us, "link bandwidth": self.link_us,
        }  # fmt: skip
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class Prefilled:
    """What prompts are to the steps of the steady state; nothing where none arrive."""

    ms: float = 0.0
    """Added to a step on average."""
    mixed_ms: float = 0.0
    """A step with a chunk beside it."""
    chunks: int = 0
    """Of a prompt."""
    use: float = 0.0
    """Share of the steps that have a chunk beside them; above 1 prompts come faster than they can be run."""


@dataclass(frozen=True)
class Estimate:
    """What one step costs and what that makes of the system."""

    scenario: Scenario
    parts: dict[str, Part]
    step_ms: float
    hidden_ms: float
    """Communication that overlap hides."""
    prefill: "Prefilled"
    limit_ms: float
    limit_resource: str
    acceptance_length: float
    memory: Memory

    @property
    def prefill_ms(self) -> float:
        """What newly arriving prompts add to a step, spread evenly."""
        return self.prefill.ms

    @property
    def ttft_s(self) -> float:
        """Seconds from a request's arrival to its first token, on average; infinite where prompts cannot keep up.

        A group runs one prompt at a time, a chunk beside each step, and the next ones wait as in the queue M/D/1.
        """
        p = self.prefill
        if p.use >= 1:
            return math.inf
        service = p.chunks * p.mixed_ms / 1e3
        return service * (1 + p.use / (2 * (1 - p.use)))

    @property
    def tokens_per_s_per_user(self) -> float:
        """Decoding speed that one request sees."""
        return self.acceptance_length / (self.step_ms + self.prefill_ms) * 1e3

    @property
    def tokens_per_s(self) -> float:
        """Of the whole system."""
        return self.scenario.concurrency * self.tokens_per_s_per_user

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Over the GPUs that the layout uses."""
        return self.tokens_per_s / self.scenario.preset.layout.num_devices

    @property
    def limit_tokens_per_s_per_user(self) -> float:
        """The same at the data-sheet rates, with no latency and everything overlapped."""
        return self.acceptance_length / self.limit_ms * 1e3

    @property
    def bottleneck(self) -> str:
        """The part that takes most of the step, and what it waits for."""
        name = max(self.parts, key=lambda part: self.parts[part].ms)
        return f"{name} ({self.parts[name].dominant})"


def _dense(s: Scenario, need: "Need", work: "Work", bits: float | None, fixed_us: float = 0.0) -> Part:
    """Dense products that read their weights once: bytes or arithmetic, whichever is slower."""
    arithmetic = "bf16" if bits is None or bits >= 16 else s.precision.dense_arithmetic
    rows = s.preset.layout.group_requests(s.concurrency) * (s.budget + 1)
    few, many = s.kernels.attention.dense_flop_fraction, s.constants.prompt_flop_fraction
    fractions = s.constants.dense_bandwidth_fraction, (rows + s.chunk) / (rows / few + s.chunk / max(few, many))
    return _slower(s, need.layers, work, fractions, arithmetic, fixed_us)


def _slower(
    s: Scenario, count: int, work: "Work", fractions: tuple[float, float], arithmetic: str, fixed_us: float = 0.0
) -> Part:
    """Work of one of `count` layers, whose reads and operations overlap.

    fractions: of the data sheet's bandwidth and arithmetic that kernels reach.
    """
    num_bytes, flops, peak = work.hbm_bytes / max(count, 1), work.flops / max(count, 1), _peak(s.gpu, arithmetic)
    memory, compute = num_bytes / (fractions[0] * s.gpu.hbm_bytes_per_s) * 1e6, flops / (fractions[1] * peak) * 1e6
    times: dict[str, Any] = {"memory_us": memory} if memory >= compute else {"compute_us": compute}
    return Part(count, fixed_us, **times, hbm_bytes=num_bytes, flops=flops, flops_per_s=peak)


def _peak(gpu: GPU, arithmetic: str) -> float:
    return getattr(gpu, f"{arithmetic}_flops_per_s")


_FIGURES = tuple(field.name for field in fields(Part) if field.name not in ("count", "flops_per_s", "note"))


def _sum(*parts: Part) -> Part:
    """Parts that run one after the other in the same layer."""
    rate = parts[0].flops_per_s
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _FIGURES}
    sums["flops"] = rate * sum(part.flops / part.flops_per_s for part in parts)
    return Part(parts[0].count, flops_per_s=rate, **sums)


def _sent(s: Scenario, network: Network, need: "Need", note: str = "") -> Part:
    """The messages of a part. One of its calls is as many of them as come together: the counts' common divisor."""
    messages = as_sent(need.messages)
    if not messages:
        return Part(need.layers if note else 0, note=note)
    calls = math.gcd(*(message.count for message in messages))
    if not calls:
        return Part(0)
    each = [
        transfer(network, s.preset.span(*message.axes), message).times(message.count / calls) for message in messages
    ]
    total = functools.reduce(operator.add, each)
    return Part(
        calls, fixed_us=total.latency_us, link_us=total.us - total.latency_us,
        local_bytes=total.local_bytes, network_bytes=total.network_bytes,
        messages=sum(message.count for message in messages) / calls, note=total.algorithm,
    )  # fmt: skip


def _streamed(s: Scenario, count: int, num_bytes: float) -> Part:
    """Bytes that are read at the rate of dense kernels."""
    us = num_bytes / (s.constants.dense_bandwidth_fraction * s.gpu.hbm_bytes_per_s) * 1e6
    return Part(count, memory_us=us, hbm_bytes=num_bytes)


def _attention(s: Scenario, need: "Need") -> Part:
    """Projections, scores and values, and what residuals and norms read and write.

    Rows of a tree share their request's cache, which is read once; each head of each row works on all of it.
    """
    k = s.kernels.attention
    projections = _dense(s, need, need.work["weights"], s.precision.attention_bits, k.us)
    arithmetic = "fp8" if s.precision.cache_bytes == 1 else "bf16"
    fractions = k.cache_bandwidth_fraction, k.cache_flop_fraction
    scores = [_slower(s, need.layers, need.work["cache"], fractions, arithmetic)]
    if "prompt" in need.work:
        prompt = need.work["prompt"]
        absorbed = replace(prompt, flops=prompt.flops * (_expanded(s.model) if k.expands_prompts else 1))
        scores.append(_slower(s, need.layers, absorbed, fractions, arithmetic))
    rows = s.preset.layout.group_requests(s.concurrency) * (s.budget + 1) + s.chunk
    passes = s.constants.elementwise_passes * 2 * s.model.hidden_size
    return _sum(projections, *scores, _streamed(s, need.layers, rows * passes))


def _expanded(m: "ModelConfig") -> float:
    """Operations of scores and values with a prompt's keys and values expanded, over those of the absorbed form."""
    expanded = m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim
    return expanded / (2 * m.kv_lora_rank + m.qk_rope_head_dim)


def _imbalance(s: Scenario, ranks: int) -> float:
    """Rows on the busiest rank over the mean through skewed routing."""
    if ranks == 1:
        return 1.0
    if s.has_eplb:
        return s.constants.imbalance_with_eplb
    return 1 + (s.constants.imbalance_without_eplb - 1) * math.sqrt(ranks / 32)


def routed(s: Scenario) -> Routed:
    """What routing makes of a step's rows on the busiest rank."""
    layout, m = s.preset.layout, s.model
    ranks, width, requests = layout.expert_ranks, s.budget + 1, math.ceil(s.concurrency / layout.dp)
    chunk = s.chunk * layout.ep
    rows = s.routing.effective_rows(requests, width) if requests else 0
    distinct = s.routing.distinct_experts(rows + chunk)
    slots = s.physical_slots or expert_slots(m.n_routed_experts, ranks)
    local = routing_module.busiest_rank_experts(distinct, m.n_routed_experts, slots // ranks, ranks)
    pairs = (requests * width + chunk) * m.num_experts_per_tok
    share = routing_module.busiest_rank_share(pairs, ranks, _imbalance(s, ranks))
    return Routed(local, pairs / ranks * share, share)


def _experts(s: Scenario, need: "Need", on_rank: Routed) -> Part:
    k, work, count = s.kernels.experts, need.work["weights"], max(need.layers, 1)
    num_bytes, flops, peak = work.hbm_bytes / count, work.flops / count, _peak(s.gpu, s.precision.expert_arithmetic)
    lost = k.extra_experts if s.preset.layout.expert_ranks > 1 else 0.0
    wasted = lost * min(on_rank.experts, 1) / on_rank.experts  # bandwidth, as a share of the experts that are read
    memory = num_bytes * (1 + wasted) / (k.bandwidth_fraction * s.gpu.hbm_bytes_per_s) * 1e6
    compute = flops / (k.flop_fraction * peak) * 1e6
    fixed = k.us + k.distinct_expert_us * on_rank.experts
    return Part(
        need.layers, max(k.floor_us - memory - compute, fixed), memory, compute, hbm_bytes=num_bytes, flops=flops,
        flops_per_s=peak, note=f"{on_rank.experts:.1f} experts on the busiest GPU",
    )  # fmt: skip


def _head(s: Scenario, network: Network, need: "Need") -> Part:
    """Logits, and an all-gather of each rank's best word with its logit, whose latency is in `head_us`."""
    logits = _dense(s, need, need.work["weights"], s.precision.head_bits, s.constants.head_us)
    picks = _sent(s, network, need)
    sent = Part(local_bytes=picks.local_bytes, network_bytes=picks.network_bytes, messages=picks.messages)
    return _sum(logits, sent)


def _drafter(s: Scenario, network: Network, need: "Need") -> Part:
    """Fusion of the accepted rows' taps, the block's layers on the context, and the target's head."""
    fixed_us = s.drafter.num_hidden_layers * s.kernels.overheads.drafter_layer_us
    layers = _dense(s, need, need.work["weights"], None, fixed_us)
    head = _dense(s, need, need.work["head"], s.precision.head_bits)
    context = _streamed(s, 1, need.work["cache"].hbm_bytes)
    return _sum(layers, head, context, _total(_sent(s, network, need)))


def _tree(s: Scenario, network: Network, need: "Need") -> Part:
    """Candidates from each rank's logits, an all-gather of them with the ranks' log-sum-exps, and the tree itself."""
    build = Part(fixed_us=s.kernels.overheads.tree_us)
    logits = _streamed(s, 1, need.work["activations"].hbm_bytes)
    return _sum(build, logits, _total(_sent(s, network, need)))


def _total(part: Part) -> Part:
    """All calls of a part as one."""
    figures: dict[str, Any] = {name: part.count * getattr(part, name) for name in _FIGURES}
    return replace(part, count=1, **figures)


_PRICED_AS = {"alltoall": "ideal", "ragged": "ideal"}
"""Exchanges whose estimate is that of the best public kernels, which send no more than what is due."""


def estimate(s: Scenario) -> Estimate:
    """Estimate one step: time by part, the physical limit, memory, and what users and the system get.

    The result's layout names the exchange that was taken, as the compiled program would take it for these rows.
    """
    from kimi_jax.ledger.step import Step, ledger  # imports jax, for which `--help` should not wait

    layout, on_rank, has_draft = s.preset.layout, routed(s), s.budget > 0
    step = Step(
        s.model, layout, s.concurrency, s.budget + 1, s.context, s.drafter if has_draft else None,
        slots=s.physical_slots, precision=s.precision, routed=on_rank, chunk=s.chunk, chunk_context=s.chunk_context,
    )  # fmt: skip
    exchange = step.used_exchange
    s = replace(s, preset=s.preset.with_layout(replace(layout, exchange=exchange)))
    priced_as = exchange if s.kernels.overheads.has_own_exchange else _PRICED_AS.get(exchange, exchange)
    needs = ledger(replace(step, exchange=priced_as))
    network = Network(s.gpu, s.preset.topology, s.constants, s.link, s.hierarchical)
    k, c = s.kernels.overheads, s.constants
    sent = sum(message.count for need in needs.values() for message in as_sent(need.messages))
    launch_us = k.launch_us * s.model.num_hidden_layers + k.host_us + k.collective_us * sent
    bits = s.precision.shared_bits
    parts = {
        "attention": _attention(s, needs["attention"]),
        "router": _dense(s, needs["router"], needs["router"].work["weights"], None, c.router_us),
        "experts": _experts(s, needs["experts"], on_rank),
        "shared_expert": _dense(s, needs["shared_expert"], needs["shared_expert"].work["weights"], bits),
        "dense": _dense(s, needs["dense"], needs["dense"].work["weights"], bits),
        "head": _head(s, network, needs["head"]),
        "drafter": _drafter(s, network, needs["drafter"]) if has_draft else Part(),
        "tree": _tree(s, network, needs["tree"]) if has_draft else Part(),
        "exchange": _sent(s, network, needs["exchange"], "" if layout.ep > 1 else "rows stay in their tp group"),
        "reductions": _sent(s, network, needs["reductions"]),
        "launch": Part(1, fixed_us=launch_us),
    }
    communication = parts["exchange"].ms + parts["reductions"].ms
    computation = sum(part.ms for part in parts.values()) - communication
    hidden = s.overlap * min(communication, computation)
    resources: Counter[str] = Counter()
    for part in parts.values():
        resources.update(part.resource_ms(s.gpu))
    limit_resource = max(resources, key=lambda name: resources[name])
    step_ms = communication + computation - hidden
    return Estimate(
        s, parts, step_ms=step_ms, hidden_ms=hidden, prefill=_prefilled(s, step_ms),
        limit_ms=resources[limit_resource], limit_resource=limit_resource,
        acceptance_length=s.acceptance.length(s.budget), memory=memory(s, needs),
    )  # fmt: skip


def _prefilled(s: Scenario, step_ms: float) -> Prefilled:
    """What prompts of newly arriving requests add to the steps.

    In the steady state each request that ends is replaced, so a group has as many prompt tokens a step to run as its
    requests × tokens of a round × prompt over answer. They run as chunks beside steps, which read the weights once for
    both.
    """
    p = s.prefill
    if p is None:
        return Prefilled()
    mixed = estimate(replace(s, prefill=None, chunk=p.chunk, chunk_context=p.input_tokens // 2))
    tokens = s.concurrency / s.preset.layout.groups * s.acceptance.length(s.budget) * p.input_tokens / p.output_tokens
    use = tokens / p.chunk
    return Prefilled(use * (mixed.step_ms - step_ms), mixed.step_ms, math.ceil(p.input_tokens / p.chunk), use)
