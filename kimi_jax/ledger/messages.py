"""What a step sends beside the exchange of its experts: every collective of layers, head, drafter and loop.

The tests hold these lists against the compiled programs, in both directions.
"""

from collections.abc import Iterator

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.parallel.messages import WORD, Message
from meshes.presets import Layout

TP = ("tp",)


def reductions(config: ModelConfig, layout: Layout, rows: int, item: int) -> Iterator[Message]:
    """What the layers of one forward send for `rows` rows of a device, of `item` bytes a value."""
    if layout.tp == 1:
        return
    row, layers = rows * config.hidden_size * item, config.num_hidden_layers
    yield Message("embedding", "all-reduce", TP, row)
    if layout.cache == "split":
        heads = rows * config.num_attention_heads
        query = config.kv_lora_rank + config.qk_rope_head_dim
        part = config.kv_lora_rank * item + WORD  # with its log-sum-exp
        yield Message("queries to all parts of the cache", "all-gather", TP, heads * query * item, layers)
        yield Message("parts of outputs to their heads", "all-to-all", TP, heads * part, layers)
    yield Message("after attention", "all-reduce", TP, row, layers)
    yield Message("after MLP or experts", "all-reduce", TP, row, layers)


def head(config: ModelConfig, layout: Layout, rows: int, *, greedy: bool = True) -> Iterator[Message]:
    """What picking the next token of `rows` rows sends: each rank's best logit and its id, or all logits to sample."""
    if layout.tp == 1:
        return
    if not greedy:
        yield Message("logits", "all-gather", TP, rows * config.vocab_size * WORD)
        return
    yield Message("best logit of each rank", "all-gather", TP, rows * layout.tp * WORD)
    yield Message("its id", "all-gather", TP, rows * layout.tp * WORD, joined=True)


def fused_taps(drafter: DrafterConfig, layout: Layout, rows: int, item: int) -> Iterator[Message]:
    """What adding `rows` rows of a device to the drafter's context sends."""
    if layout.tp > 1:
        yield Message("rows' fused taps", "all-gather", TP, rows * drafter.hidden_size * item)


def drafting(drafter: DrafterConfig, layout: Layout, requests: int, item: int) -> Iterator[Message]:
    """What drafting a block for each of a device's requests sends."""
    if layout.tp == 1:
        return
    block, layers = requests * drafter.block_size * drafter.hidden_size * item, drafter.num_hidden_layers
    yield Message("block's embedding", "all-reduce", TP, block)
    yield Message("after drafter's attention", "all-reduce", TP, block, layers)
    yield Message("after drafter's MLP", "all-reduce", TP, block, layers)


def tree(drafter: DrafterConfig, layout: Layout, requests: int, depth: int, budget: int) -> Iterator[Message]:
    """What choosing the candidates of trees of at most `budget` nodes and `depth` levels sends."""
    if layout.tp == 1:
        return
    candidates = drafter.selector_top_k or min(budget, drafter.vocab_size)
    best = requests * depth * layout.tp * WORD
    each = min(candidates, drafter.vocab_size // layout.tp)
    yield Message("candidates of each rank", "all-gather", TP, best * each)
    yield Message("their ids", "all-gather", TP, best * each, joined=True)
    yield Message("log-sum-exp of each rank", "all-gather", TP, best, joined=True)


def overflow(layout: Layout) -> Iterator[Message]:
    """What a round asks whose exchange has bounded buffers: whether those of any tp rank overflowed."""
    if layout.tp > 1:
        yield Message("whether any buffer overflowed", "all-reduce", TP, WORD)


def loop(layout: Layout) -> Iterator[Message]:
    """What the loop of rounds asks after each: whether any request still runs."""
    axes = tuple(axis for axis in layout.batch_axes if layout.axis_sizes[axis] > 1)
    if axes:
        yield Message("requests that still run", "all-reduce", axes, WORD)
