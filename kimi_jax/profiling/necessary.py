"""What a program must move and compute on one device, from the declared shapes and the rows it runs.

HBM bytes are the weights it needs, once, and the cache it reads; activations are left out (a few MB at decode sizes).
Routed experts are those that uniform, independent routing touches, on average over the ranks: real trees touch fewer.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

from kimi_jax.estimator.routing import uniform
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.compile import Placed

_WEIGHT_PARTS = (
    (r"^drafter\.", "drafter"),
    (r"\.embed_tokens\.", "embedding"),
    (r"\.mlp\.experts\.", "experts"),
    (r"\.mlp\.shared_experts\.", "shared_expert"),
    (r"\.mlp\.gate\.", "router"),
    (r"\.mlp\.", "dense"),
    (r"\.(self_attn|input_layernorm|post_attention_layernorm)\.", "attention"),
    (r"^target\.(lm_head|model\.norm)\.", "head"),
)


@dataclass(frozen=True)
class Need:
    """Of one part, in one execution of the program, on one device."""

    hbm_bytes: float = 0.0
    flops: float = 0.0


def weight_part(name: str) -> str:
    """The part a weight belongs to, by its place in the parameters.

    Raises:
      ValueError: a weight of no known part.
    """
    for pattern, part in _WEIGHT_PARTS:
        if re.search(pattern, name):
            return part
    raise ValueError(f"{name} belongs to no known part of the model")


def weight_bytes(weights: Iterable[Placed]) -> dict[str, int]:
    """Bytes one device holds, by part (the embedding counts as a part of its own)."""
    totals: dict[str, int] = {}
    for array in weights:
        part = weight_part(array.name)
        totals[part] = totals.get(part, 0) + array.bytes
    return totals


_CONTEXT_WEIGHTS = re.compile(r"^drafter\.(fc|hidden_norm|layers\.\d+\.self_attn\.(k_proj|k_norm|v_proj))\.")


def read_weights(case: Case, weights: Iterable[Placed]) -> list[Placed]:
    """Those that the program reads: a prefill fills the drafter's context and drafts nothing."""
    if case.program != "prefill":
        return list(weights)
    return [array for array in weights if weight_part(array.name) != "drafter" or _CONTEXT_WEIGHTS.match(array.name)]


def state_bytes(state: Iterable[Placed]) -> dict[str, int]:
    """Bytes of one device's decoding state: `cache`, the drafter's `context`, and `other`."""
    totals = {"cache": 0, "context": 0, "other": 0}
    for array in state:
        kind = array.name.split(".")[0]
        totals[kind if kind in totals else "other"] += array.bytes
    return totals


def touched_experts(case: Case) -> float:
    """Expected experts that one rank reads in a layer when routing is uniform."""
    layout, config = case.preset.layout, case.config
    routing = uniform(config.n_routed_experts, config.num_experts_per_tok)
    replica_rows = case.device_requests * layout.ep * case.rows
    return routing.distinct_experts(replica_rows) / layout.expert_ranks


def needs(case: Case, weights: Iterable[Placed]) -> dict[str, Need]:
    """By part. Prefill needs no drafter or tree but the context's keys and values."""
    config, layout = case.config, case.preset.layout
    held = weight_bytes(read_weights(case, weights))
    rows = case.device_requests * case.rows
    head_rows = case.device_requests * (1 if case.program == "prefill" else case.rows)
    size = jnp.dtype(case.dtype).itemsize
    needed = {
        part: Need(num_bytes, 2 * rows * num_bytes / size)  # two operations a weight and row
        for part, num_bytes in held.items()
        if part in ("attention", "router", "shared_expert", "dense")
    }
    needed["head"] = Need(held["head"], 2 * head_rows * held["head"] / size)
    needed["other"] = Need(rows * config.hidden_size * size)  # rows of the embedding
    cached = needed["attention"]
    needed["attention"] = Need(cached.hbm_bytes + _cache_bytes(case), cached.flops + _score_flops(case))
    if "experts" in held:
        width = layout.tp if layout.experts == "width" else 1
        expert = 3 * config.hidden_size * config.moe_intermediate_size / width
        bits = 4 + 16 / config.quantization_group_size
        replica_rows = rows * layout.ep
        pairs = replica_rows * config.num_experts_per_tok / layout.expert_ranks
        layers = config.num_moe_layers
        needed["experts"] = Need(layers * touched_experts(case) * expert * bits / 8, layers * 2 * pairs * expert)
    if "drafter" in held:
        needed |= _drafting(case, held)
    return needed


def _cache_bytes(case: Case) -> float:
    """Latents and rotary keys of the cached context, read once for all rows of a request."""
    config = case.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    ranks = case.preset.layout.tp if case.preset.layout.cache == "split" else 1
    size = jnp.dtype(case.dtype).itemsize
    return case.device_requests * case.context * width * size * config.num_hidden_layers / ranks


def _score_flops(case: Case) -> float:
    """Absorbed scores and values of all rows and heads over the context."""
    config = case.config
    heads = config.num_attention_heads / case.preset.layout.tp
    width = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    return 2.0 * case.device_requests * case.rows * heads * width * case.context * config.num_hidden_layers


def _drafting(case: Case, held: dict[str, int]) -> dict[str, Need]:
    drafter = case.drafter
    assert drafter is not None
    requests, tp = case.device_requests, case.preset.layout.tp
    if case.program == "prefill":
        rows, window, heads_read = requests * case.rows, 0, 0
    else:
        rows, window = requests * drafter.block_size, min(drafter.draft_window, case.context)
        heads_read = held["head"]
    kv_heads = max(1, drafter.num_key_value_heads // tp)
    size = jnp.dtype(case.dtype).itemsize
    ring = requests * window * drafter.num_hidden_layers * kv_heads * drafter.head_dim * 2 * size
    logits = 0 if case.program == "prefill" else requests * case.depth * case.config.vocab_size / tp * 4
    flops = 2 * (rows * held["drafter"] + requests * case.depth * heads_read) / size
    return {"drafter": Need(held["drafter"] + heads_read + ring, flops), "tree": Need(logits)}
