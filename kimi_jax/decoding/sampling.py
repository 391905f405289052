"""The target's next token for every row of a step: the same whatever the mesh, the batch or the speculation.

A token is drawn by the Gumbel-max rule with noise that belongs to (the request's seed, its sample number, the token's
position), never to its place in a batch.
Rows at one depth of a draft tree share their noise; only one of them lies on the realised path, so each emitted token
is an exact draw from the target given its prefix, and speculation changes neither its law nor the draw itself.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from kimi_jax.ddtree.tree import largest
from kimi_jax.parallel.collectives import all_gather, all_reduce, axis_index

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

    @property
    def filters(self) -> bool:
        """Whether some tokens are left out."""
        return not self.greedy and bool(self.top_k or self.top_p < 1 or self.min_p)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samplings:
    """`Sampling`s of several requests; a temperature of 0 is greedy."""

    temperature: Float[Array, " requests"]
    top_k: Int[Array, " requests"]
    top_p: Float[Array, " requests"]
    min_p: Float[Array, " requests"]

    @classmethod
    def greedy(cls, requests: int) -> "Samplings":
        """So many requests that take the most likely token."""
        zeros = jnp.zeros(requests)
        return cls(zeros, zeros.astype(jnp.int32), zeros + 1, zeros)

    @classmethod
    def of(cls, each: Sequence[Sampling]) -> "Samplings":
        """One entry for each, as NumPy arrays."""
        temperature = [0 if one.greedy else one.temperature for one in each]
        top_k, top_p, min_p = ([getattr(one, name) for one in each] for name in ("top_k", "top_p", "min_p"))
        most = np.iinfo(np.int32).max  # more than any vocabulary: it keeps all, as 0 does
        columns = (np.asarray(column, np.float32) for column in (temperature, top_p, min_p))
        temperatures, top_ps, min_ps = columns
        return cls(temperatures, np.minimum(top_k, most).astype(np.int32), np.maximum(top_ps, LEAST_TOP_P), min_ps)  # pyright: ignore[reportArgumentType]


Kind = Literal["greedy", "temperature", "filters"]


@dataclasses.dataclass(frozen=True)
class Draws:
    """Which kinds of requests a program can draw for; those of a smaller kind are right in every larger one.

    A branch inside a program would make a GPU wait for its host, and the sort of the filters costs more than all else,
    so each is a program of its own, compiled when it is first wanted.
    """

    kind: Kind = "greedy"
    logprobs: bool = False
    """Whether log-probabilities are told of every token, and of the most likely ones beside it."""
    prompt: int | None = None
    """The same of prompts, and how many most likely tokens beside each; None tells nothing of prompts."""


KEYS = "threefry2x32"
"""Named, so that texts do not follow a change of JAX's default generator."""
SEEDS = (-(1 << 63), (1 << 63) - 1)
"""Least and greatest seed: all 64 bits count."""


def check_seed(seed: int) -> int:
    """The seed as an int.

    Raises:
      ValueError: it is no integer or does not fit 64 bits; the range is named.
    """
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
    return _folded_in(halves.reshape(-1, 2), np.asarray(samples, np.uint32))


def _folded_in(keys: UInt32[np.ndarray, "requests 2"], numbers: UInt32[np.ndarray, " requests"]) -> np.ndarray:
    """`jax.random.fold_in` of threefry2x32 in NumPy: a request that comes must not wait for what the devices run."""
    parts = [keys[:, 0], keys[:, 1], keys[:, 0] ^ keys[:, 1] ^ np.uint32(0x1BD11BDA)]
    first, second = parts[0].copy(), numbers + parts[1]
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            first += second
            second = (second << np.uint32(turn) | second >> np.uint32(32 - turn)) ^ first
        first += parts[(block + 1) % 3]
        second += parts[(block + 2) % 3] + np.uint32(block + 1)
    return np.stack([first, second], axis=1)


def only_known(logits: Float[Array, "*rows vocab_local"], known: int | None) -> Float[Array, "*rows vocab_local"]:
    """This tp rank's logits with ids from `known` on at -inf; None leaves them all."""
    if known is None:
        return logits
    ids = axis_index("tp") * logits.shape[-1] + jnp.arange(logits.shape[-1])
    return jnp.where(ids < known, logits, -jnp.inf)


def not_yet(
    logits: Float[Array, "requests rows vocab_local"],
    stops: Int[Array, "requests stops"],
    early: Bool[Array, "requests rows"],
) -> Float[Array, "requests rows vocab_local"]:
    """This tp rank's logits, in early rows with their request's stop tokens at -inf."""
    size = logits.shape[-1]
    local = stops - axis_index("tp") * size
    local = jnp.where((local >= 0) & (local < size), local, size)
    stopping = jnp.zeros((len(stops), size), bool).at[jnp.arange(len(stops))[:, None], local].set(True, mode="drop")
    return jnp.where(stopping[:, None] & early[..., None], -jnp.inf, logits)


def next_tokens(
    logits: Float[Array, "requests rows vocab_local"],
    positions: Int[Array, "requests rows"],
    keys: UInt32[Array, "requests 2"],
    sampling: Samplings,
    kind: Kind = "filters",
) -> tuple[Int[Array, "requests rows"], Bool[Array, "requests rows"]]:
    """Token that follows each row, and whether the row's logits were finite (an id must not be made of NaN).

    Args:
      logits: float32, this tp rank's part of the vocabulary.
      positions: of the rows; the token drawn stands one later.
      keys: of the requests, from `request_keys`.
      sampling: how each request draws.
      kind: the largest kind among the requests; see `Draws`.
    """
    if kind == "greedy":
        return most_likely(logits)
    full = all_gather(logits, "tp", dimension=-1)
    hot = sampling.temperature > 0
    scaled = full / jnp.where(hot, sampling.temperature, 1)[:, None, None]
    if kind == "filters":
        filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
        scaled = jnp.where((hot & filters)[:, None, None], filtered(scaled, sampling), scaled)

    def noise(key: Array, position: Array) -> Array:
        return jax.random.gumbel(
            jax.random.fold_in(jax.random.wrap_key_data(key, impl=KEYS), position), full.shape[-1:]
        )

    noisy = scaled + jnp.where(hot[:, None, None], jax.vmap(jax.vmap(noise, (None, 0)))(keys, positions + 1), 0)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32), jnp.isfinite(scaled.max(-1))


def most_likely(logits: Float[Array, "requests rows vocab_local"]) -> tuple[Array, Array]:
    """Greedy choice over the sharded vocabulary: two numbers a row and rank travel; ties go to the lower id."""
    ids, best = largest(logits)
    ids = (ids + axis_index("tp") * logits.shape[-1])[..., None]
    best, ids = all_gather(best[..., None], "tp", dimension=-1), all_gather(ids, "tp", dimension=-1)
    winner = jnp.argmax(best, axis=-1, keepdims=True)
    token = jnp.take_along_axis(ids, winner, axis=-1)[..., 0]
    return token, jnp.isfinite(jnp.take_along_axis(best, winner, axis=-1)[..., 0])


def filtered(logits: Float[Array, "requests rows vocab"], sampling: Samplings) -> Float[Array, "requests rows vocab"]:
    """Logits, already divided by the temperature, with what the filters exclude at -inf. Ties at a cut are kept."""
    top_k, top_p, min_p = (x[:, None, None] for x in (sampling.top_k, sampling.top_p, sampling.min_p))
    ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    ordered = jnp.where((jnp.arange(ordered.shape[-1]) < top_k) | (top_k == 0), ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < top_p) & (probabilities >= min_p * probabilities[..., :1]) & (ordered > -jnp.inf)
    cut = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= cut, logits, -jnp.inf)


def log_probabilities(
    logits: Float[Array, "*rows vocab_local"], tokens: Int[Array, "*rows"], top: int = 0
) -> tuple[Float[Array, "*rows"], Int[Array, "*rows top"], Float[Array, "*rows top"]]:
    """Natural log-probabilities of given tokens, and the `top` most likely ones with theirs, in falling order.

    The vocabulary stays where it lies: a few numbers a row and tp rank travel, never its logits.
    """
    size = logits.shape[-1]
    parts = all_gather(jax.nn.logsumexp(logits, axis=-1, keepdims=True), "tp", dimension=-1)
    whole = jax.nn.logsumexp(parts, axis=-1)
    local = tokens - axis_index("tp") * size
    own = (local >= 0) & (local < size)
    chosen = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1)[..., None], axis=-1)[..., 0]
    chosen = all_reduce(jnp.where(own, chosen, 0.0), "tp")
    if not top:
        nothing = jnp.zeros((*tokens.shape, 0))
        return chosen - whole, nothing.astype(jnp.int32), nothing
    best, ids = jax.lax.top_k(logits, min(top, size))
    ids = ids.astype(jnp.int32) + axis_index("tp") * size
    best, ids = all_gather(best, "tp", dimension=-1), all_gather(ids, "tp", dimension=-1)
    best, places = jax.lax.top_k(best, min(top, best.shape[-1]))
    return chosen - whole, jnp.take_along_axis(ids, places, axis=-1), best - whole[..., None]
