"""One step of decoding on one layout: time by part, physical limit, memory and throughput.

The parts of a step have the names that the compiled program's report uses, so that the two can be laid side by side.
"""

import math
from dataclasses import dataclass, replace

from kimi_jax.estimator import routing as routing_module
from kimi_jax.estimator.collectives import Network, Transfer, all_reduce, dispatch_and_combine, gather_and_scatter
from kimi_jax.estimator.memory import Memory, drafter_context_bytes, memory
from kimi_jax.estimator.model import Weights
from kimi_jax.estimator.scenario import Scenario
from kimi_jax.parallel.exchange_choice import used
from meshes import GPU, expert_slots

PARTS = (
    "attention", "router", "experts", "shared_expert", "dense", "head",
    "drafter", "tree", "exchange", "reductions", "launch",
)  # fmt: skip
"""Parts of a step, in the order of a table. `drafter` includes its own reductions and its use of the head."""


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
    total_us: float = 0.0
    hbm_bytes: float = 0.0
    flops: float = 0.0
    flops_per_s: float = 1.0
    local_bytes: float = 0.0
    network_bytes: float = 0.0
    messages: float = 0
    activation_bytes: float = 0.0
    """Of `hbm_bytes`, what is neither weights nor cache."""
    note: str = ""

    @property
    def argument_bytes(self) -> float:
        """Of `hbm_bytes`, what lies in memory from step to step: weights, cache, the drafter's context."""
        return self.hbm_bytes - self.activation_bytes

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
class Estimate:
    """What one step costs and what that makes of the system."""

    scenario: Scenario
    parts: dict[str, Part]
    step_ms: float
    hidden_ms: float
    """Communication that overlap hides."""
    prefill_ms: float
    limit_ms: float
    limit_resource: str
    acceptance_length: float
    memory: Memory

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


@dataclass(frozen=True)
class _Rows:
    """How a load lies on a layout: the fullest attention group, and one replica's expert group."""

    requests: int
    rows: int
    replica_requests: int
    replica_rows: int
    rows_per_request: int


def _rows(s: Scenario) -> _Rows:
    layout, width = s.preset.layout, s.budget + 1
    requests = math.ceil(s.concurrency / (layout.dp * layout.ep))
    replica = math.ceil(s.concurrency / layout.dp)
    return _Rows(requests, requests * width, replica, replica * width, width)


def _gemm(s: Scenario, count: int, weights: float, bits: float, rows: float, fixed_us: float = 0.0) -> Part:
    """A dense matmul that reads its weights once: bytes or arithmetic, whichever is slower."""
    gpu, c = s.gpu, s.constants
    num_bytes, flops = weights * bits / 8, 2 * rows * weights
    peak = _peak(gpu, "bf16" if bits >= 16 else s.precision.dense_arithmetic)
    memory = num_bytes / (c.dense_bandwidth_fraction * gpu.hbm_bytes_per_s) * 1e6
    compute = flops / (s.kernels.attention.dense_flop_fraction * peak) * 1e6
    return Part(
        count, fixed_us, memory if memory >= compute else 0.0, compute if compute > memory else 0.0, 0.0,
        fixed_us + max(memory, compute), num_bytes, flops, peak,
    )  # fmt: skip


def _peak(gpu: GPU, arithmetic: str) -> float:
    return {"bf16": gpu.bf16_flops_per_s, "fp8": gpu.fp8_flops_per_s, "fp4": gpu.fp4_flops_per_s}[arithmetic]


def _sum(*parts: Part) -> Part:
    """Parts that run one after the other in the same layer."""
    count, fixed, memory, compute, link, total, hbm, seconds, local, network = parts[0].count, *[0.0] * 9
    messages, activations = (sum(getattr(p, name) for p in parts) for name in ("messages", "activation_bytes"))
    for part in parts:
        fixed, memory, compute = fixed + part.fixed_us, memory + part.memory_us, compute + part.compute_us
        link, total, hbm = link + part.link_us, total + part.total_us, hbm + part.hbm_bytes
        seconds += part.flops / part.flops_per_s
        local, network = local + part.local_bytes, network + part.network_bytes
    rate = parts[0].flops_per_s
    return Part(
        count, fixed, memory, compute, link, total, hbm, seconds * rate, rate, local, network, messages, activations
    )


def _communication(count: int, transfer: Transfer, messages: float = 1) -> Part:
    return Part(
        count, fixed_us=transfer.latency_us, link_us=transfer.us - transfer.latency_us, total_us=transfer.us,
        local_bytes=transfer.local_bytes, network_bytes=transfer.network_bytes,
        messages=messages if transfer.us else 0, note=transfer.algorithm,
    )  # fmt: skip


def _attention(s: Scenario, load: _Rows) -> Part:
    m, gpu, k = s.model, s.gpu, s.kernels.attention
    tp, w = s.preset.layout.tp, Weights(s.model)
    weights = w.attention_replicated + w.attention_split / tp
    projections = _gemm(s, m.num_hidden_layers, weights, s.precision.attention_bits, load.rows, k.us)
    split = tp if s.is_cache_split else 1
    width = m.kv_lora_rank + m.qk_rope_head_dim
    # Rows of a tree share their request's cache, which is read once; each head of each row works on all of it.
    cache = load.requests * s.context * width * s.precision.cache_bytes / split
    heads = m.num_attention_heads / (1 if s.is_cache_split else tp)
    flops = 2 * load.rows * heads * (width + m.kv_lora_rank) * s.context / split
    peak = gpu.fp8_flops_per_s if s.precision.cache_bytes == 1 else gpu.bf16_flops_per_s
    memory = cache / (k.cache_bandwidth_fraction * gpu.hbm_bytes_per_s) * 1e6
    compute = flops / (k.cache_flop_fraction * peak) * 1e6
    elementwise = load.rows * s.constants.elementwise_bytes_per_row
    elementwise_us = elementwise / (s.constants.dense_bandwidth_fraction * gpu.hbm_bytes_per_s) * 1e6
    scores = Part(
        m.num_hidden_layers, 0.0, memory if memory >= compute else 0.0, compute if compute > memory else 0.0, 0.0,
        max(memory, compute), cache, flops, peak,
    )  # fmt: skip
    rest = Part(
        m.num_hidden_layers, memory_us=elementwise_us, total_us=elementwise_us, hbm_bytes=elementwise,
        activation_bytes=elementwise,
    )  # fmt: skip
    return _sum(projections, scores, rest)


def _imbalance(s: Scenario, ranks: int) -> float:
    """Rows on the busiest rank over the mean through skewed routing."""
    if ranks == 1:
        return 1.0
    if s.has_eplb:
        return s.constants.imbalance_with_eplb
    return 1 + (s.constants.imbalance_without_eplb - 1) * math.sqrt(ranks / 32)


def expert_load(s: Scenario) -> tuple[float, float, float]:
    """Experts that the busiest rank reads in a layer, row-expert pairs it works on, and those over the mean."""
    load, layout, m = _rows(s), s.preset.layout, s.model
    ranks = layout.expert_ranks
    distinct = s.routing.distinct_experts(s.routing.effective_rows(load.replica_requests, load.rows_per_request))
    slots = s.physical_slots or expert_slots(m.n_routed_experts, ranks)
    local = routing_module.busiest_rank_experts(distinct, m.n_routed_experts, slots // ranks, ranks)
    pairs = load.replica_rows * m.num_experts_per_tok
    share = routing_module.busiest_rank_share(pairs, ranks, _imbalance(s, ranks))
    return local, pairs / ranks * share, share


def _experts(s: Scenario) -> Part:
    layout, gpu, k = s.preset.layout, s.gpu, s.kernels.experts
    local, pairs, _ = expert_load(s)
    width = layout.tp if layout.experts == "width" else 1
    weights = Weights(s.model).expert / width
    one = weights * s.precision.expert_bits / 8
    lost = k.extra_experts if layout.expert_ranks > 1 else 0.0
    peak = _peak(gpu, s.precision.expert_arithmetic)
    memory = (local + lost * min(local, 1)) * one / (k.bandwidth_fraction * gpu.hbm_bytes_per_s) * 1e6
    compute = 2 * pairs * weights / (k.flop_fraction * peak) * 1e6
    fixed = k.us + k.distinct_expert_us * local
    total = max(k.floor_us, fixed + memory + compute)
    return Part(
        s.model.num_moe_layers, total - memory - compute, memory, compute, 0.0, total,
        local * one, 2 * pairs * weights, peak, note=f"{local:.1f} experts on the busiest GPU",
    )  # fmt: skip


def _exchange(s: Scenario, network: Network, load: _Rows) -> Part:
    layout, m = s.preset.layout, s.model
    if layout.ep == 1:
        return Part(m.num_moe_layers, note="rows stay in their tp group")
    if layout.exchange in ("allgather", "tensor"):
        # Every group sends as many rows as the fullest one, with an id and a weight for each choice; sums come back.
        rows, span = load.rows * layout.ep, s.preset.span("ep")
        gather = gather_and_scatter(network, span, rows * (2 * m.hidden_size + 8 * m.num_experts_per_tok))
        scatter = gather_and_scatter(network, span, rows * 2 * m.hidden_size)
        transfer = gather.times(0.5) + scatter.times(0.5)
    else:
        span = s.preset.span(*layout.expert_axes)
        # The rank that receives most is the last to finish.
        rows = load.rows / (layout.tp if layout.experts == "slots" else 1) * expert_load(s)[2]
        transfer = dispatch_and_combine(
            network, span, rows, m.num_experts_per_tok, m.hidden_size, s.precision.dispatch_bytes
        )
    return _communication(m.num_moe_layers, transfer, messages=2)


def _reductions(s: Scenario, network: Network, load: _Rows) -> Part:
    """Two all-reduces a layer over tp (attention; experts, shared or dense), and one of the embedding, split by words.

    With a split cache every rank attends to its part of the sequence for all heads: queries are gathered, and each
    head's parts with their log-sum-exps sent to the rank that holds the head.
    """
    m, span = s.model, s.preset.span("tp")
    if span.size == 1:
        return Part(0)
    reduction = all_reduce(network, span, load.rows * m.hidden_size * 2)
    if not s.is_cache_split:
        return _communication(2 * m.num_hidden_layers + 1, reduction)
    heads = load.rows * m.num_attention_heads
    queries = gather_and_scatter(network, span, heads * 2 * (m.kv_lora_rank + m.qk_rope_head_dim)).times(0.5)
    outputs = gather_and_scatter(network, span, heads * (2 * m.kv_lora_rank + 4)).times(0.5)
    layer = reduction.times(2 + 1 / m.num_hidden_layers) + queries + outputs
    return _communication(m.num_hidden_layers, layer, messages=4 + 1 / m.num_hidden_layers)


def _drafter(s: Scenario, network: Network, load: _Rows) -> Part:
    """Fusion of the accepted rows' taps, the block's layers on the context, and the target's head.

    Two all-reduces a layer and one of the block's embedding, and an all-gather of the fused rows.
    """
    d, tp, span = s.drafter, s.preset.layout.tp, s.preset.span("tp")
    rows, depth = load.requests * d.block_size, _depth(s)
    fixed_us = d.num_layers * s.kernels.overheads.drafter_layer_us
    layers = _gemm(s, 1, d.weights / tp, 8 * d.bytes_per_weight, rows, fixed_us)
    head = _gemm(s, 1, Weights(s.model).head / tp, s.precision.head_bits, load.requests * depth)
    ring = load.requests * drafter_context_bytes(s)
    ring_us = ring / (s.constants.dense_bandwidth_fraction * s.gpu.hbm_bytes_per_s) * 1e6
    context = Part(memory_us=ring_us, total_us=ring_us, hbm_bytes=ring)
    reductions = all_reduce(network, span, rows * d.hidden_size * 2).times(2 * d.num_layers + 1)
    fused = gather_and_scatter(network, span, load.requests * (depth + 1) * d.hidden_size * 2).times(0.5)
    messages = 2 * d.num_layers + 2
    return _sum(layers, head, context, _communication(1, reductions + fused, messages))


def _depth(s: Scenario) -> int:
    """Longest path of a draft tree."""
    return min(s.drafter.max_depth, s.budget)


def _tree(s: Scenario, network: Network, load: _Rows) -> Part:
    """Candidates from each rank's logits, an all-gather of them with the ranks' log-sum-exps, and the tree itself."""
    tp, fixed_us = s.preset.layout.tp, s.kernels.overheads.tree_us
    positions = load.requests * _depth(s)
    logits = positions * s.model.vocab_size * 4 / tp
    logits_us = logits / (s.constants.dense_bandwidth_fraction * s.gpu.hbm_bytes_per_s) * 1e6
    gathered = positions * tp * (8 * min(s.budget, s.model.vocab_size) + 4)
    candidates = gather_and_scatter(network, s.preset.span("tp"), gathered).times(0.5)
    build = Part(1, fixed_us, logits_us, 0.0, 0.0, fixed_us + logits_us, logits, activation_bytes=logits)
    return _sum(build, _communication(1, candidates))


def _head(s: Scenario, network: Network, load: _Rows) -> Part:
    """Logits, and an all-gather of each rank's best word with its logit, whose latency is in `head_us`."""
    c, tp = s.constants, s.preset.layout.tp
    logits = _gemm(s, 1, Weights(s.model).head / tp, s.precision.head_bits, load.rows, c.head_us)
    picks = gather_and_scatter(network, s.preset.span("tp"), load.rows * tp * 8).times(0.5)
    sent = Part(local_bytes=picks.local_bytes, network_bytes=picks.network_bytes, messages=1 if picks.us else 0)
    return _sum(logits, sent)


def _with_exchange(s: Scenario) -> Scenario:
    layout = s.preset.layout
    if layout.exchange != "auto":
        return s
    slots = s.physical_slots or expert_slots(s.model.n_routed_experts, layout.expert_ranks)
    name = used(layout, _rows(s).rows, s.model.num_experts_per_tok, slots)
    return replace(s, preset=s.preset.with_layout(replace(layout, exchange=name)))


def estimate(s: Scenario) -> Estimate:
    """Estimate one step: time by part, the physical limit, memory, and what users and the system get.

    The result's layout names the exchange that was taken, as the compiled program would take it for these rows.
    """
    s = _with_exchange(s)
    m, gpu, k, c, layout = s.model, s.gpu, s.kernels.overheads, s.constants, s.preset.layout
    load, w = _rows(s), Weights(s.model)
    network = Network(gpu, s.preset.topology, c, s.link)
    tp, rows = layout.tp, load.rows
    has_draft = s.budget > 0
    launch_us = k.launch_us * m.num_hidden_layers + k.host_us
    parts = {
        "attention": _attention(s, load),
        "router": _gemm(s, m.num_moe_layers, w.router, 16, rows, c.router_us),
        "experts": _experts(s),
        "shared_expert": _gemm(s, m.num_moe_layers, w.shared / tp, s.precision.shared_bits, rows),
        "dense": _gemm(s, m.first_k_dense_replace, w.dense / tp, s.precision.shared_bits, rows),
        "head": _head(s, network, load),
        "drafter": _drafter(s, network, load) if has_draft else Part(),
        "tree": _tree(s, network, load) if has_draft else Part(),
        "exchange": _exchange(s, network, load),
        "reductions": _reductions(s, network, load),
        "launch": Part(1, fixed_us=launch_us, total_us=launch_us),
    }
    communication = parts["exchange"].ms + parts["reductions"].ms
    computation = sum(part.ms for part in parts.values()) - communication
    hidden = s.overlap * min(communication, computation)
    resources: dict[str, float] = {}
    for part in parts.values():
        for resource, ms in part.resource_ms(gpu).items():
            resources[resource] = resources.get(resource, 0.0) + ms
    limit_resource = max(resources, key=lambda name: resources[name])
    return Estimate(
        scenario=s,
        parts=parts,
        step_ms=communication + computation - hidden,
        hidden_ms=hidden,
        prefill_ms=_prefill_ms(s),
        limit_ms=resources[limit_resource],
        limit_resource=limit_resource,
        acceptance_length=s.acceptance.length(s.budget),
        memory=memory(s, load.requests),
    )


def _prefill_ms(s: Scenario) -> float:
    """Time that prompts of newly arriving requests take from each decode step, spread evenly.

    In the steady state each request that ends is replaced, so prompts come at concurrency × input tokens for every
    output_tokens steps' worth of tokens.
    """
    if s.prefill is None:
        return 0.0
    is_hopper = s.gpu.compute_capability[0] == 9
    c = s.constants
    rate = c.prefill_tokens_per_s_hopper if is_hopper else c.prefill_tokens_per_s_blackwell
    per_token = s.concurrency * s.prefill.input_tokens / (rate * s.preset.layout.num_devices * s.prefill.output_tokens)
    return 1e3 * per_token * s.acceptance.length(s.budget)
