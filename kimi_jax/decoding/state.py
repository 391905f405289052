"""What decoding carries from step to step, all of it on the devices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, UInt32

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import Cache, empty_cache

FINE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """One batch of requests. Every array has the requests as its first axis and lies over dp and ep."""

    cache: Cache
    lengths: Int[Array, " requests"]
    """Tokens that have been run and cached."""
    anchors: Int[Array, " requests"]
    """The newest token: drawn, not yet run. It stands at position `lengths`."""
    emitted: Int[Array, "requests max_new_tokens"]
    counts: Int[Array, " requests"]
    """Tokens emitted so far, the anchor included, a stop token not."""
    limits: Int[Array, " requests"]
    """Tokens each request may emit."""
    finished: Bool[Array, " requests"]
    failed: Int[Array, " requests"]
    """Position at which the logits were not finite, or FINE."""
    keys: UInt32[Array, "requests 2"]
    rounds: Int[Array, " requests"]
    """Steps in which the request was still running."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What the host reads between dispatches, the same on every device."""

    emitted: Int[Array, "requests max_new_tokens"]
    counts: Int[Array, " requests"]
    finished: Bool[Array, " requests"]
    failed: Int[Array, " requests"]
    rounds: Int[Array, " requests"]


def initial_state(
    config: ModelConfig,
    *,
    keys: UInt32[Array, "requests 2"],
    limits: Int[Array, " requests"],
    capacity: int,
    max_new_tokens: int,
    dtype: DTypeLike,
) -> DecodeState:
    """Nothing run yet; a request whose limit is 0 is padding and finished from the start."""
    requests = limits.shape[0]
    zeros = jnp.zeros(requests, jnp.int32)
    return DecodeState(
        cache=empty_cache(config, requests, capacity, dtype),
        lengths=zeros,
        anchors=zeros,
        emitted=jnp.zeros((requests, max_new_tokens), jnp.int32),
        counts=zeros,
        limits=limits,
        finished=limits == 0,
        failed=jnp.full(requests, FINE, jnp.int32),
        keys=keys,
        rounds=zeros,
    )


def emit(state: DecodeState, tokens: Int[Array, "requests steps"], new: Int[Array, " requests"],
         stop_ids: tuple[int, ...]) -> DecodeState:  # fmt: skip
    """Appends the first `new` of `tokens` to each running request's text, up to its limit or a stop token."""
    steps = jnp.arange(tokens.shape[1])
    stops = jnp.isin(tokens, jnp.asarray(stop_ids, jnp.int32)) & (steps < new[:, None])
    before_stop = jnp.where(stops.any(1), jnp.argmax(stops, axis=1), new)
    taken = jnp.where(state.finished, 0, jnp.minimum(before_stop, state.limits - state.counts))
    columns = jnp.where(steps < taken[:, None], state.counts[:, None] + steps, state.emitted.shape[1])
    emitted = state.emitted.at[jnp.arange(tokens.shape[0])[:, None], columns].set(tokens, mode="drop")
    counts = state.counts + taken
    return dataclasses.replace(
        state,
        emitted=emitted,
        counts=counts,
        finished=state.finished | stops.any(1) | (counts >= state.limits),
    )
