"""What decoding carries from step to step, all of it on the devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, PyTree, UInt32

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import Cache, empty_cache

FINE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """What layers counted, prefill included: every device adds up its own, so no message is spent on it."""

    loads: Int[Array, "groups layers experts"] | None = None
    """Rows of each device group (dp, ep) that chose each expert; None where experts stay where they are."""
    exchanges: Int[Array, "devices 2"] | None = None
    """Exchanges through bounded buffers, and those among them that overflowed and took the exact path; None where the
    exchange has no such buffers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """One batch of requests. Every array but the counters has the requests as its first axis, over dp and ep."""

    cache: Cache
    lengths: Int[Array, " requests"]
    """Tokens that have been run and cached."""
    anchors: Int[Array, " requests"]
    """The newest token: drawn, not yet run. It stands at position `lengths`."""
    emitted: Int[Array, "requests max_new_tokens"]
    counts: Int[Array, " requests"]
    """Tokens emitted so far, the anchor and a stop token included."""
    limits: Int[Array, " requests"]
    """Tokens each request may emit."""
    finished: Bool[Array, " requests"]
    failed: Int[Array, " requests"]
    """Position at which the logits were not finite, or FINE."""
    keys: UInt32[Array, "requests 2"]
    round_tokens: Int[Array, "requests steps"]
    """[n]: rounds that put more than n tokens into the text. What stands behind a stop token or the limit is none."""
    hits: Int[Array, "requests depth"] | None
    """[d]: rounds whose draft of depth d + 1 the target would have written too, be it behind the end of the text; None
    where nothing is drafted."""
    nodes: Int[Array, " requests"]
    """Draft tree nodes verified, over all rounds."""
    context: PyTree
    """What the drafter keeps of the text; None without one."""
    counters: Counters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What the host reads between dispatches, the same on every device."""

    emitted: Int[Array, "requests max_new_tokens"]
    counts: Int[Array, " requests"]
    finished: Bool[Array, " requests"]
    failed: Int[Array, " requests"]
    round_tokens: Int[Array, "requests steps"]
    hits: Int[Array, "requests depth"] | None
    nodes: Int[Array, " requests"]
    exchanges: Int[Array, ""] | None = None
    """Exchanges through bounded buffers so far: one for each layer, replica and tp rank of a step."""
    overflows: Int[Array, ""] | None = None
    """Those among them that took the exact path."""

    @property
    def rounds(self) -> Int[np.ndarray, " requests"]:
        """Rounds in which the request was still running: each gives a token at least."""
        return np.asarray(self.round_tokens)[:, 0]


def initial_state(
    config: ModelConfig,
    *,
    keys: UInt32[Array, "requests 2"],
    limits: Int[Array, " requests"],
    capacity: int,
    max_new_tokens: int,
    dtype: DTypeLike,
    max_depth: int = 0,
    context: PyTree = None,
    cache_axis: str | None = None,
    counters: Counters = Counters(),
) -> DecodeState:
    """Nothing run yet; a request whose limit is 0 is padding and finished from the start.

    Args:
      capacity: positions of the cache, a round's speculative rows included.
      max_depth: of the draft trees; a round gives at most one token more.
      context: the drafter's empty context.
      cache_axis: mesh axis whose ranks share a request's cached positions.
      counters: zeros for what is counted.
    """
    requests = limits.shape[0]
    zeros = jnp.zeros(requests, jnp.int32)
    return DecodeState(
        cache=empty_cache(config, requests, capacity, dtype, cache_axis),
        lengths=zeros,
        anchors=zeros,
        emitted=jnp.zeros((requests, max_new_tokens), jnp.int32),
        counts=zeros,
        limits=limits,
        finished=limits == 0,
        failed=jnp.full(requests, FINE, jnp.int32),
        keys=keys,
        round_tokens=jnp.zeros((requests, max_depth + 1), jnp.int32),
        hits=jnp.zeros((requests, max_depth), jnp.int32) if max_depth else None,
        nodes=zeros,
        context=context,
        counters=counters,
    )
