"""The target's next token for every row of a step: the same whatever the mesh, the batch or the speculation.

A token is drawn by the Gumbel-max rule with noise that belongs to (the request's seed, its sample number, the token's
position), never to its place in a batch.
Rows at one depth of a draft tree share their noise; only one of them lies on the realised path, so each emitted token
is an exact draw from the target given its prefix, and speculation changes neither its law nor the draw itself.
"""

import dataclasses
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from kimi_jax.ddtree.tree import largest
from kimi_jax.parallel.collectives import all_gather, axis_index

COLDEST, HOTTEST = 1e-30, 1e30
"""Temperatures by which float32 logits can be divided. Below, every other token has probability 0."""
LEAST_TOP_P = 1e-30
"""A top_p below the probability of any most likely token, which float32 holds."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the target picks; temperature 0 is greedy. Filters apply in the order top-k, top-p, min-p."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together reach this probability, always at least one."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the most likely token's probability."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= HOTTEST:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive, at most {HOTTEST}")
        if not isinstance(self.top_k, int | np.integer) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be an integer, 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must lie in [0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken: at temperature 0, and so near it that all else is 0."""
        return self.temperature < COLDEST


KEYS = "threefry2x32"
"""Named, so that texts do not follow a change of JAX's default generator."""
SEEDS = (-(1 << 63), (1 << 63) - 1)
"""Least and greatest seed: all 64 bits count."""


def check_seed(seed: int) -> int:
    """The seed as an int. Raises ValueError, naming the range, where it is none or does not fit 64 bits."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise ValueError(f"seed is {seed!r}; it must be an integer") from None
    if not SEEDS[0] <= number <= SEEDS[1]:
        raise ValueError(f"seed is {number}; it must lie in {SEEDS[0]} .. {SEEDS[1]} (64 bits)")
    return number


def request_keys(seeds: Sequence[int], samples: Sequence[int]) -> UInt32[np.ndarray, "requests 2"]:
    """One key for each request, from its own seed and sample number (0 .. 2^32 - 1) and nothing else."""
    halves = np.array([(seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF) for seed in map(check_seed, seeds)], np.uint32)
    keys = jax.random.wrap_key_data(jnp.asarray(halves.reshape(-1, 2)), impl=KEYS)
    return np.asarray(jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, np.asarray(samples, np.uint32))))


def only_known(logits: Float[Array, "*rows vocab_local"], known: int | None) -> Float[Array, "*rows vocab_local"]:
    """This tp rank's logits with ids from `known` on at -inf; None leaves them all."""
    if known is None:
        return logits
    ids = axis_index("tp") * logits.shape[-1] + jnp.arange(logits.shape[-1])
    return jnp.where(ids < known, logits, -jnp.inf)


def next_tokens(
    logits: Float[Array, "requests rows vocab_local"],
    positions: Int[Array, "requests rows"],
    keys: UInt32[Array, "requests 2"],
    sampling: Sampling,
) -> tuple[Int[Array, "requests rows"], Bool[Array, "requests rows"]]:
    """Token that follows each row, and whether the row's logits were finite (an id must not be made of NaN).

    Args:
      logits: float32, this tp rank's part of the vocabulary.
      positions: of the rows; the token drawn stands one later.
    """
    if sampling.greedy:
        return _argmax(logits)
    full = filtered_logits(all_gather(logits, "tp", dimension=-1), sampling)

    def noise(key: Array, position: Array) -> Array:
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.wrap_key_data(key, impl=KEYS), position), full.shape[-1:]
        )

    noisy = full + jax.vmap(jax.vmap(noise, (None, 0)))(keys, positions + 1)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32), jnp.isfinite(full.max(-1))


def _argmax(logits: Float[Array, "requests rows vocab_local"]) -> tuple[Array, Array]:
    """Greedy choice over the sharded vocabulary: two numbers a row and rank travel; ties go to the lower id."""
    ids, best = largest(logits)
    ids = (ids + axis_index("tp") * logits.shape[-1])[..., None]
    best, ids = all_gather(best[..., None], "tp", dimension=-1), all_gather(ids, "tp", dimension=-1)
    winner = jnp.argmax(best, axis=-1, keepdims=True)
    token = jnp.take_along_axis(ids, winner, axis=-1)[..., 0]
    return token, jnp.isfinite(jnp.take_along_axis(best, winner, axis=-1)[..., 0])


def filtered_logits(logits: Float[Array, "*rows vocab"], sampling: Sampling) -> Float[Array, "*rows vocab"]:
    """Logits divided by the temperature, with what the filters exclude at -inf. Tokens tied at a cut are kept."""
    logits = logits / sampling.temperature
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        return logits
    ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        ordered = jnp.where(jnp.arange(ordered.shape[-1]) < sampling.top_k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < max(sampling.top_p, LEAST_TOP_P)) & (probabilities >= sampling.min_p * probabilities[..., :1])
    kept &= ordered > -jnp.inf
    cut = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= cut, logits, -jnp.inf)
