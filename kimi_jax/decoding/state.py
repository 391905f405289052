"""What decoding carries from dispatch to dispatch, all of it on the devices: slots that requests come into and leave.

A slot whose prompt has run is ready; rounds run what is ready, not finished and active. The host owns the page table
and passes it, with the active slots, into every dispatch.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from kimi_jax.config import ModelConfig
from kimi_jax.decoding.sampling import Samplings
from kimi_jax.model.pages import Cache, Places, empty_cache, places_of
from kimi_jax.model.rows import Rows, causal_rows

FINE = -1
STOPS = 8
"""Stop tokens that a request may have."""
NO_TOKEN = -1
"""Fills a slot's stop tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """What layers counted, prefill included: every device adds up its own, so no message is spent on it."""

    loads: Int[Array, "groups layers experts"] | None = None
    """Rows of each device group (dp, ep) that chose each expert; None where experts stay where they are."""
    exchanges: Int[Array, "devices 2"] | None = None
    """Exchanges through bounded buffers, and those among them that overflowed, so that a layer or a whole round was run
    again exactly; None where the exchange has no such buffers."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asked:
    """What a request brings into its slot."""

    keys: UInt32[Array, "slots 2"]
    limits: Int[Array, " slots"]
    """Tokens it may emit; 0 for one whose prompt is only scored."""
    stops: Int[Array, "slots stops"]
    """Tokens that end its text, filled up with NO_TOKEN."""
    budgets: Int[Array, " slots"]
    """Draft tree nodes of its rounds at most; 0 decodes plainly."""
    least: Int[Array, " slots"]
    """Position from which on a stop token may be drawn."""
    sampling: Samplings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All slots. Every array but the pools and the counters has the slots as its first axis, over dp and ep."""

    cache: Cache
    """The pool of pages, of every device group its own."""
    lengths: Int[Array, " slots"]
    """Tokens that have been run and cached."""
    anchors: Int[Array, " slots"]
    """The newest token: drawn, not yet run. It stands at position `lengths`."""
    counts: Int[Array, " slots"]
    """Tokens emitted so far, the anchor and a stop token included."""
    asked: Asked
    ready: Bool[Array, " slots"]
    """Whether the whole prompt has run."""
    finished: Bool[Array, " slots"]
    failed: Int[Array, " slots"]
    """Position at which the logits were not finite, or FINE."""
    round_tokens: Int[Array, "slots steps"]
    """[n]: rounds that put more than n tokens into the text. What stands behind a stop token or the limit is none."""
    hits: Int[Array, "slots depth"] | None
    """[d]: rounds whose draft of depth d + 1 the target would have written too, be it behind the end of the text; None
    where nothing is drafted."""
    nodes: Int[Array, " slots"]
    """Draft tree nodes verified, over all rounds."""
    context: PyTree
    """What the drafter keeps of the text; None without one."""
    counters: Counters
    context_pages: PyTree = None
    """The same of all positions, in the pool's pages; None where prompts share none."""
    now: "Dispatch | None" = None
    """Inside a program, what the host has passed into it and what it hands back."""

    @property
    def running(self) -> Bool[Array, " slots"]:
        """The slots whose texts a round goes on with."""
        assert self.now is not None
        return self.ready & ~self.finished & self.now.active

    @property
    def fresh(self) -> "Fresh":
        """What the dispatch has emitted."""
        assert self.now is not None
        assert self.now.fresh is not None
        return self.now.fresh

    @property
    def pages(self) -> Int[Array, "slots tiles"]:
        """The page table."""
        assert self.now is not None
        return self.now.pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fresh:
    """Tokens that one dispatch has emitted, and what is told of each."""

    tokens: Int[Array, "slots width"]
    counts: Int[Array, " slots"]
    logprobs: Float[Array, "slots width"] | None = None
    """Natural log-probability of each token under the raw logits; None in programs that are not asked."""
    top: "Top | None" = None
    prompt: "Scored | None" = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Top:
    """The most likely tokens of some rows, in falling order."""

    ids: Int[Array, "*rows top"]
    logprobs: Float[Array, "*rows top"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scored:
    """What the model says of given tokens behind some rows; arrays on the device or NumPy's."""

    logprobs: Float[Array, "*rows"]
    """Natural log-probability of each row's token under the raw logits."""
    greedy: Bool[Array, "*rows"]
    """Whether it is the most likely one."""
    top: Top
    """As many as are asked, perhaps none."""

    def pack(self) -> Int[Array, "*rows columns"]:
        """One integer array for the host: log-probability, whether greedy, top ids, and their log-probabilities."""
        bits = [jax.lax.bitcast_convert_type(x, jnp.int32) for x in (self.logprobs, self.top.logprobs)]
        greedy = self.greedy.astype(jnp.int32)
        return jnp.concatenate([bits[0][..., None], greedy[..., None], self.top.ids, bits[1]], axis=-1)

    @classmethod
    def unpack(cls, packed: Int[np.ndarray, "*rows columns"]) -> "Scored":
        """What `pack` packed."""
        count = (packed.shape[-1] - 2) // 2
        floats = np.ascontiguousarray(packed).view(np.float32)
        top = Top(packed[..., 2 : 2 + count], floats[..., 2 + count :])  # pyright: ignore[reportArgumentType]
        return cls(floats[..., 0], packed[..., 1] == 1, top)  # pyright: ignore[reportArgumentType]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """What belongs to one dispatch alone."""

    pages: Int[Array, "slots tiles"]
    """Pages of each slot's positions, by the group's own numbers; entries that a length does not need are arbitrary."""
    active: Bool[Array, " slots"]
    """False for free slots and for those that wait for pages; in a dispatch also behind a round that overflowed."""
    fresh: Fresh | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lanes:
    """A piece of the prompts of some slots, one a lane."""

    tokens: Int[Array, "lanes rows"]
    counts: Int[Array, " lanes"]
    """Real tokens; 0 for an idle lane."""
    slots: Int[Array, " lanes"]
    """Of this device group; a number past the last for an idle lane."""
    last: Bool[Array, " lanes"]
    """Whether the prompt ends here."""
    following: Int[Array, "lanes rows"] | None = None
    """The token behind each row, for programs that tell its log-probability; 0 where none is known."""
    embeddings: Float[Array, "lanes rows hidden"] | None = None
    """Rows of images, zeros elsewhere; None where there are none."""

    def of(self, values: Array) -> Array:
        """The lanes' entries of an array over slots."""
        return values.at[self.slots].get(mode="clip")

    def put(self, values: Array, new: Array) -> Array:
        """An array over slots with the lanes' entries changed; idle lanes change none."""
        return values.at[self.slots].set(new, mode="drop")

    def rows(self, state: DecodeState, tiles: int) -> Rows:
        """As the forward takes them, behind at most so many tiles of cached pages.

        The table is wider: what the chunk itself fills has pages too.
        """
        lengths = jnp.where(self.counts > 0, self.of(state.lengths), 0)
        return causal_rows(self.tokens, lengths, self.counts, self.of(state.pages)[:, :tiles], self.embeddings)

    def places(self, state: DecodeState, rows: Rows, before: int = 0) -> Places:
        """Where the rows are cached; see `places_of`."""
        count = self.tokens.shape[1]
        return places_of(state.cache, self.of(state.pages), rows.lengths, self.counts, count, before)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hits:
    """Slots whose prompts begin in pages that others have filled."""

    slots: Int[Array, " hits"]
    """Of the device group; a number past the last for an entry of nobody."""
    lengths: Int[Array, " hits"]
    """Tokens of the prompt that the slot's pages hold already."""
    pages: Int[Array, "hits tiles"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admissions:
    """Requests that come into slots."""

    slots: Int[Array, " lanes"]
    """Of the device group; a number past the last for an entry that admits nobody."""
    lengths: Int[Array, " lanes"]
    """Tokens of the prompt that the slot's pages hold already."""
    asked: Asked
    """One entry for each of `slots`."""


def initial_state(
    config: ModelConfig,
    *,
    slots: int,
    pages: int,
    dtype: DTypeLike,
    max_depth: int = 0,
    context: PyTree = None,
    cache_axis: str | None = None,
    cache_ranks: int = 1,
    counters: Counters = Counters(),
    context_pages: PyTree = None,
) -> DecodeState:
    """Nobody there.

    Args:
      slots, pages: over all device groups.
      max_depth: of the draft trees; a round gives at most one token more.
      context: the drafter's empty context.
      cache_axis: mesh axis whose ranks share a request's cached positions, `cache_ranks` of them.
      counters: zeros for what is counted.
      context_pages: the drafter's part of an empty pool.
    """
    zeros = jnp.zeros(slots, jnp.int32)
    return DecodeState(
        cache=empty_cache(config, pages, dtype, cache_axis, cache_ranks),
        lengths=zeros,
        anchors=zeros,
        counts=zeros,
        asked=Asked(
            keys=jnp.zeros((slots, 2), jnp.uint32),
            limits=zeros,
            stops=jnp.full((slots, STOPS), NO_TOKEN, jnp.int32),
            budgets=zeros,
            least=zeros,
            sampling=Samplings.greedy(slots),
        ),
        ready=zeros > 0,
        finished=zeros == 0,
        failed=jnp.full(slots, FINE, jnp.int32),
        round_tokens=jnp.zeros((slots, max_depth + 1), jnp.int32),
        hits=jnp.zeros((slots, max_depth), jnp.int32) if max_depth else None,
        nodes=zeros,
        context=context,
        counters=counters,
        context_pages=context_pages,
    )


def admit(state: DecodeState, new: Admissions) -> DecodeState:
    """Slots begin with new requests; nothing of the pool or of the drafter's context is touched.

    What of a drafter's context is in pages already is taken from there apart; see `Speculation.restore`.
    """

    def put(old: Array, values: Array | int | bool) -> Array:
        return old.at[new.slots].set(jnp.asarray(values, old.dtype), mode="drop")

    zeros = {name: put(getattr(state, name), 0) for name in ("anchors", "counts", "nodes", "round_tokens")}
    return dataclasses.replace(
        state,
        lengths=put(state.lengths, new.lengths),
        asked=jax.tree.map(put, state.asked, new.asked),
        ready=put(state.ready, False),
        finished=put(state.finished, False),
        failed=put(state.failed, FINE),
        hits=None if state.hits is None else put(state.hits, 0),
        **zeros,
    )


POOLS = ("cache", "context_pages")
"""The fields of a state that have a device group's pages as their first axis."""


def _slot_fields(state: DecodeState) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(state):
        if field.name not in (*POOLS, "counters", "now"):
            yield field.name, getattr(state, field.name)


def first_slots(state: DecodeState, count: int) -> DecodeState:
    """This device group's first slots alone, on the same pool."""
    kept = {name: jax.tree.map(lambda x: x[:count], value) for name, value in _slot_fields(state)}
    return dataclasses.replace(state, **kept)


def with_first_slots(state: DecodeState, first: DecodeState) -> DecodeState:
    """A state with what its first slots have become; pool and counters are theirs."""
    count = first.lengths.shape[0]
    if count == state.lengths.shape[0]:
        return dataclasses.replace(first, now=None)
    both = jax.tree.map(lambda old, new: old.at[:count].set(new), dict(_slot_fields(state)), dict(_slot_fields(first)))
    shared = {name: getattr(first, name) for name in (*POOLS, "counters")}
    return dataclasses.replace(state, **shared, **both)
