"""The ledger of a step: what each part holds, reads, computes and sends on one device.

Weights come from the declarations and the layout, messages from the exchange's own file and `ledger.messages`. The
estimator multiplies this by rates, `--explain` prints it, and the profiler holds the compiled program against it.
Bytes of memory traffic are the weights, once, and the cache. Of activations, a few MB at decode sizes, only the
drafter's logits and the rows of the embedding count.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.ledger import messages
from kimi_jax.ledger.part import PARTS
from kimi_jax.ledger.precision import STORED, Precision
from kimi_jax.ledger.routing import Routed, uniform
from kimi_jax.ledger.weights import Shard, drafter_held, drafter_read, model_held
from kimi_jax.parallel.exchange import Traffic, messages_of
from kimi_jax.parallel.exchange.choice import used
from kimi_jax.parallel.messages import WORD, Message
from meshes.presets import Layout, expert_slots

Program = Literal["round", "decode", "prefill", "mixed"]
"""One round, the loop of rounds, a chunk of every request's prompt, or a round with a chunk of one prompt beside it."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What is asked: one step of a model on a layout, under a load."""

    config: ModelConfig
    layout: Layout
    requests: int
    """In the whole machine."""
    rows: int
    """Rows that the target runs for each request: with a drafter its tree and the root."""
    context: int
    """Cached tokens of each request."""
    drafter: DrafterConfig | None = None
    program: Program = "round"
    chunk: int = 0
    """Rows of another prompt that a device group of a mixed step runs beside the trees."""
    chunk_context: int | None = None
    """Cached tokens that such a row sees, on average; by default as many as the requests have."""
    slots: int = 0
    """Expert slots of one replica and layer; 0 for the fewest that divide."""
    dtype: DTypeLike = jnp.bfloat16
    """Type of activations, dense weights and cache."""
    precision: Precision = STORED
    routed: Routed | None = None
    """What routing makes of the rows; None for the mean over ranks of uniform routing."""
    exchange: str | None = None
    """A declared exchange to count in place of the layout's."""
    greedy: bool = True
    """Whether the most likely token is taken; sampling sends all logits."""

    @property
    def item(self) -> int:
        """Bytes of one value of an activation."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def device_requests(self) -> int:
        """Requests of one device, padding included."""
        return self.layout.group_requests(self.requests)

    @property
    def device_rows(self) -> int:
        """Rows of one device."""
        return self.device_requests * self.rows + self.chunk

    @property
    def head_rows(self) -> int:
        """Rows of one device that logits are wanted of: of a prompt its last one."""
        prompts = self.program == "prefill"
        return self.device_requests * (1 if prompts else self.rows) + bool(self.chunk)

    @property
    def num_slots(self) -> int:
        """Expert slots of one replica and layer."""
        return self.slots or expert_slots(self.config.n_routed_experts, self.layout.expert_ranks)

    @property
    def used_exchange(self) -> str:
        """The exchange that carries this step's rows: the layout's, or what `auto` takes."""
        return used(self.layout, self.device_rows, self.config.num_experts_per_tok, self.num_slots)

    @property
    def depth(self) -> int:
        """Longest path of a draft tree; 0 where none is drafted."""
        if self.drafter is None or self.program == "prefill":
            return 0
        return min(self.drafter.block_size - 1, self.rows - 1)

    @property
    def experts(self) -> Routed:
        """What routing makes of the rows on one rank."""
        if self.routed is not None:
            return self.routed
        config, ranks = self.config, self.layout.expert_ranks
        rows = self.device_rows * self.layout.ep
        distinct = uniform(config.n_routed_experts, config.num_experts_per_tok).distinct_experts(rows)
        return Routed(distinct / ranks, rows * config.num_experts_per_tok / ranks, 1.0)


@dataclasses.dataclass(frozen=True)
class Work:
    """What is read from memory, and what is computed with it."""

    hbm_bytes: float = 0.0
    flops: float = 0.0


@dataclasses.dataclass(frozen=True)
class Need:
    """One part of a step on one device, all its layers together."""

    layers: int = 1
    """Times that the part occurs in a step."""
    weights: float = 0.0
    """Bytes held of weights."""
    cache: float = 0.0
    """Bytes held of cached latents, or of the drafter's context."""
    work: dict[str, Work] = dataclasses.field(default_factory=dict)
    """By what is read: `weights`, `cache`, `prompt` (a chunk's cache), `head` (the drafter's use), `activations`."""
    messages: tuple[Message, ...] = ()

    @property
    def total(self) -> Work:
        """All its work together."""
        each = self.work.values()
        return Work(sum(work.hbm_bytes for work in each), sum(work.flops for work in each))


NOTHING = Need(0)
"""A part that a step does not have."""


def ledger(step: Step) -> dict[str, Need]:
    """Every part of the step, in the order of `PARTS`; those that it does not have are `NOTHING`."""
    found = dict(_model(step))
    if step.drafter is not None and (step.depth or step.program == "prefill"):
        found |= _drafter(step, step.drafter, found["head"])
    return {part: found.get(part, NOTHING) for part in PARTS}


def _model(step: Step) -> Iterator[tuple[str, Need]]:
    config, layout, rows, moe_layers = step.config, step.layout, step.device_rows, step.config.num_moe_layers
    shards = model_held(config, layout, jnp.dtype(step.dtype), step.num_slots)
    held = {part: _stored(step, shard) for part, shard in shards.items()}
    cache = step.device_requests * cache_bytes(step)
    scores = _score_flops(step, step.device_requests * step.rows, step.context)
    work = {"weights": _products(held["attention"], rows), "cache": Work(cache, scores)}
    if step.chunk:
        seen = step.context if step.chunk_context is None else step.chunk_context
        work["prompt"] = Work(cache_bytes(step, seen), _score_flops(step, step.chunk, seen))
    yield "attention", Need(config.num_hidden_layers, held["attention"].bytes, cache, work)
    for part, layers in (
        ("router", moe_layers), ("shared_expert", moe_layers), ("dense", config.first_k_dense_replace),
    ):  # fmt: skip
        yield part, Need(layers, held[part].bytes, work={"weights": _products(held[part], rows)})
    routed, local = step.experts, step.num_slots // layout.expert_ranks  # slots of a rank in a layer
    read = Work(
        held["experts"].bytes / local * routed.experts, 2 * held["experts"].values / local * routed.pairs
    )  # fmt: skip
    yield "experts", Need(moe_layers, held["experts"].bytes, work={"weights": read})
    picks = tuple(messages.head(config, layout, step.head_rows, greedy=step.greedy))
    yield "head", Need(1, held["head"].bytes, work={"weights": _products(held["head"], step.head_rows)}, messages=picks)
    looked_up = Work(rows * config.hidden_size * step.item)
    yield "embedding", Need(1, held["embedding"].bytes, work={"activations": looked_up})
    yield "exchange", Need(moe_layers, messages=_exchanged(step))
    yield "reductions", Need(1, messages=tuple(messages.reductions(config, layout, rows, step.item)))
    bounded = layout.ep > 1 and (step.exchange or step.used_exchange) == "alltoall"
    asked = [*messages.overflow(layout)] if bounded and step.program in ("round", "decode") else []
    asked += messages.loop(layout) if step.program == "decode" else []
    if asked:
        yield "other", Need(1, messages=tuple(asked))


def _stored(step: Step, held: Shard) -> Shard:
    """The part in the precision that is asked for."""
    bits = step.precision.bits(held.part)
    return held if bits is None else dataclasses.replace(held, bytes=held.values * bits / 8)


def _products(weights: Shard, rows: float) -> Work:
    """Each weight read once, with two operations a weight and row."""
    return Work(weights.bytes, 2 * rows * weights.values)


def cache_bytes(step: Step, tokens: int | None = None) -> float:
    """Latents and rotary keys of one request, by default its whole context, on each of the tp ranks that serve it."""
    config, tokens = step.config, step.context if tokens is None else tokens
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return config.num_hidden_layers * width * (step.precision.cache_bytes or step.item) * _positions(step, tokens)


def _positions(step: Step, tokens: int) -> int:
    return -(-tokens // step.layout.cache_ranks)


def _score_flops(step: Step, rows: int, tokens: int) -> float:
    """Absorbed scores and values of rows on cached tokens: its heads on all of them, or all heads on its part."""
    config = step.config
    heads = config.num_attention_heads / step.layout.tp * step.layout.cache_ranks
    width = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    return 2.0 * rows * heads * width * _positions(step, tokens) * config.num_hidden_layers


def _exchanged(step: Step) -> tuple[Message, ...]:
    config, layout = step.config, step.layout
    declared = messages_of(step.exchange or step.used_exchange)
    if layout.ep == 1:
        return ()
    row, hidden = step.precision.dispatch_bytes or step.item, config.hidden_size
    traffic = Traffic(
        layout, step.device_rows, row * hidden, step.item * hidden, config.num_experts_per_tok, step.num_slots,
        step.experts.share,
    )  # fmt: skip
    return tuple(dataclasses.replace(m, count=m.count * config.num_moe_layers) for m in declared(traffic))


def context_bytes(step: Step, drafter: DrafterConfig) -> int:
    """The drafter's keys and values of one request on each tp rank: those of the last `draft_window` tokens."""
    heads = max(drafter.num_key_value_heads // step.layout.tp, 1)
    window = min(drafter.draft_window, step.context)
    return 2 * drafter.num_hidden_layers * window * heads * drafter.head_dim * step.item


def _drafter(step: Step, drafter: DrafterConfig, head: Need) -> Iterator[tuple[str, Need]]:
    layout, requests, item, dtype = step.layout, step.device_requests, step.item, jnp.dtype(step.dtype)
    held, cache = drafter_held(drafter, layout, dtype).bytes, requests * context_bytes(step, drafter)
    read = drafter_read(drafter, layout, dtype, prefill=step.program == "prefill")
    if step.program == "prefill":
        work = {"weights": _products(read, step.device_rows)}
        yield "drafter", Need(1, held, cache, work, tuple(messages.fused_taps(drafter, layout, step.device_rows, item)))
        return
    positions, of_head = requests * step.depth, head.work["weights"]
    taps = 2 * step.chunk * drafter_read(drafter, layout, dtype, prefill=True).values
    work = {
        "weights": Work(read.bytes, 2 * requests * drafter.block_size * read.values + taps),
        "head": Work(of_head.hbm_bytes, of_head.flops * positions / step.head_rows),
        "cache": Work(cache),
    }
    sent = messages.drafting(drafter, layout, requests, item)
    fused = messages.fused_taps(drafter, layout, requests + positions + step.chunk, item)
    yield "drafter", Need(1, held, cache, work, (*sent, *fused))
    logits = Work(positions * step.config.vocab_size / layout.tp * WORD)
    chosen = messages.tree(drafter, layout, requests, step.depth, step.rows - 1)
    yield "tree", Need(1, work={"activations": logits}, messages=tuple(chosen))
