"""What a round sends: every collective with its mesh axes, number and bytes, from sizes alone.

The tests hold these lists against the compiled programs, in both directions.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.config import ModelConfig
from kimi_jax.parallel.exchange_choice import buffer_rows, used
from meshes.presets import Layout

if TYPE_CHECKING:
    from kimi_jax.drafter.config import DrafterConfig

TP = ("tp",)
WORD = 4
"""Bytes of an id, a weight, a float32 logit."""


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of a round, as a device sees it."""

    what: str
    kind: str
    axes: tuple[str, ...]
    count: int
    """In a round, over all layers."""
    bytes: int
    """Of one: what a device contributes to a sum or sends, what it holds after a gather."""


def forward_messages(config: ModelConfig, layout: Layout, rows: int, dtype: DTypeLike, slots: int) -> list[Message]:
    """What one forward of the layers sends for `rows` rows of a device; axes of size 1 send nothing.

    A step of the exchange `alltoall` whose buffers overflow sends its dispatch, and then what `allgather` sends.
    """
    item = jnp.dtype(dtype).itemsize
    row = config.hidden_size * item
    layers = config.num_hidden_layers
    found = []
    if layout.tp > 1:
        found.append(Message("embedding", "all-reduce", TP, 1, rows * row))
        if layout.cache == "split":
            heads = rows * config.num_attention_heads
            query = config.kv_lora_rank + config.qk_rope_head_dim
            found.append(Message("queries to all parts of the cache", "all-gather", TP, layers, heads * query * item))
            part = config.kv_lora_rank * item + WORD  # with its log-sum-exp
            found.append(Message("parts of outputs to their heads", "all-to-all", TP, layers, heads * part))
        found.append(Message("after attention", "all-reduce", TP, layers, rows * row))
        found.append(Message("after MLP or experts", "all-reduce", TP, layers, rows * row))
    if layout.ep > 1:
        found += _exchange(config, layout, rows, row, slots)
    return found


def _exchange(config: ModelConfig, layout: Layout, rows: int, row: int, slots: int) -> Iterator[Message]:
    choice = 2 * WORD * config.num_experts_per_tok  # an id and a weight each
    backend = used(layout, rows, config.num_experts_per_tok, slots)
    ep, layers = ("ep",), config.num_moe_layers
    if backend in ("allgather", "tensor"):
        yield Message("rows to experts", "all-gather", ep, layers, layout.ep * rows * (row + choice))
        yield Message("sums back", "reduce-scatter", ep, layers, layout.ep * rows * row)
        return
    local = slots // layout.expert_ranks
    if backend == "ragged":
        due = math.ceil(rows * layout.ep * _needed(config, slots, local))
        yield Message("rows due by rank", "all-to-all", ep, layers, WORD * layout.ep)
        yield Message("rows to experts, expected", "ragged-all-to-all", ep, layers, due * (row + choice))
        yield Message("sums back, expected", "ragged-all-to-all", ep, layers, due * row)
        return
    capacity = buffer_rows(rows, config.num_experts_per_tok, slots, local, layout.ep)
    yield Message("rows to experts", "all-to-all", ep, layers, layout.ep * capacity * (row + choice + WORD))
    yield Message("sums back", "all-to-all", ep, layers, layout.ep * capacity * row)


def _needed(config: ModelConfig, slots: int, local: int) -> float:
    """Probability that a row's even choices touch a rank."""
    return 1 - math.prod(max(slots - local - i, 0) / (slots - i) for i in range(config.num_experts_per_tok))


def head_messages(config: ModelConfig, layout: Layout, rows: int, *, greedy: bool = True) -> list[Message]:
    """What picking the next token of `rows` rows sends: each rank's best logit and its id, or all logits to sample."""
    if layout.tp == 1:
        return []
    if not greedy:
        return [Message("logits", "all-gather", TP, 1, rows * config.vocab_size * WORD)]
    return [
        Message("best logit of each rank", "all-gather", TP, 1, rows * layout.tp * WORD),
        Message("its id", "all-gather", TP, 1, rows * layout.tp * WORD),
    ]


def drafter_messages(
    drafter: "DrafterConfig", layout: Layout, requests: int, budget: int, dtype: DTypeLike
) -> list[Message]:
    """What drafting trees of at most `budget` nodes for a device's requests sends, and adding what is accepted."""
    if layout.tp == 1:
        return []
    row = requests * drafter.hidden_size * jnp.dtype(dtype).itemsize
    block, depth, layers = drafter.block_size, min(drafter.block_size - 1, budget), drafter.num_hidden_layers
    candidates = drafter.selector_top_k or min(budget, drafter.vocab_size)
    each = min(candidates, drafter.vocab_size // layout.tp)
    best = requests * depth * layout.tp * WORD
    return [
        Message("block's embedding", "all-reduce", TP, 1, block * row),
        Message("after drafter's attention", "all-reduce", TP, layers, block * row),
        Message("after drafter's MLP", "all-reduce", TP, layers, block * row),
        Message("candidates of each rank", "all-gather", TP, 1, best * each),
        Message("their ids", "all-gather", TP, 1, best * each),
        Message("log-sum-exp of each rank", "all-gather", TP, 1, best),
        Message("accepted rows' fused taps", "all-gather", TP, 1, (depth + 1) * row),
    ]


def loop_messages(layout: Layout) -> list[Message]:
    """What a round asks beside its work: whether any request still runs."""
    axes = tuple(axis for axis in layout.batch_axes if layout.axis_sizes[axis] > 1)
    return [Message("requests that still run", "all-reduce", axes, 1, WORD)] if axes else []
