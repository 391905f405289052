"""The compiled programs of decoding: requests come into slots, chunks of their prompts run, and rounds write on.

Each is one `shard_map` over the whole mesh inside one `jit`, with the state donated: no collective is added by the
compiler, no weight and no page is copied, and the host is asked nothing between the first round and the last.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from kimi_jax.decoding.sampling import Draws
from kimi_jax.decoding.snapshot import Columns
from kimi_jax.decoding.speculation import Speculation
from kimi_jax.decoding.state import (
    Admissions,
    Counters,
    DecodeState,
    Dispatch,
    Fresh,
    Hits,
    Lanes,
    Top,
    admit,
    first_slots,
    initial_state,
    with_first_slots,
)
from kimi_jax.decoding.step import TOP, Step
from kimi_jax.model.moe import MixtureOfExperts
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.collectives import all_gather, all_reduce, axis_size
from kimi_jax.parallel.sharding import REQUESTS, cache_axis, cache_multiple, cache_spec, over_mesh
from kimi_jax.parameters import Parameters, Rules, bind, specs
from meshes.presets import AXES
from pallas_kernels.tree_attention import PAGE

REPLICATED = PartitionSpec()
BATCH_AXES = ("dp", "ep")
Run = Callable[..., tuple[DecodeState, tuple[Array, ...]]]
"""Parameters, state, `Dispatch` and perhaps `Lanes` to the state and what the host reads: the array that `Columns`
unpacks and, of chunks whose prompts are scored, the one that `Scored` does."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """Programs for one model on one mesh and the kinds of requests it draws for; compiled when they are first run.

    Parameters are passed as `{"target": …}`, with `"drafter"` beside it where the drafter has weights, and
    `"placement"`, tables by layer, where experts move.
    """

    model: CausalLM
    mesh: Mesh
    rules: Rules
    draws: Draws
    dtype: DTypeLike
    speculation: Speculation = dataclasses.field(default_factory=Speculation)
    experts_move: bool = False
    """The placement of experts is an argument and not part of the programs, and their loads are counted."""
    exchange_may_overflow: bool = False
    """Count the exchanges that took the exact path."""
    known_ids: int | None = None
    """Ids below this have a meaning in the tokenizer, and no other is drawn; None where all rows of the head have."""
    exact: bool = False
    """Rounds take the exact path of exchanges that may overflow. Other rounds run again by this where they overflow."""
    ends_early: bool = False
    """End a dispatch's rounds when no slot runs any more. On a GPU the host would have to look at every round: there
    the number of rounds is part of the program, and what has finished idles."""

    def with_rows(self, rows: int) -> "Programs":
        """The same with draft trees of so many rows, the root included. It takes this one's states; compiled once."""
        return self._variant(rows, lambda: {"speculation": self.speculation.with_budget(rows - 1)})

    def drawing(self, draws: Draws) -> "Programs":
        """The same for other kinds of requests. It takes this one's states; compiled once."""
        return self if draws == self.draws else self._variant(draws, lambda: {"draws": draws})

    def exactly(self) -> "Programs":
        """The same with rounds whose exchanges cannot overflow. It takes this one's states; compiled once."""
        return self if self.exact else self._variant("exact", lambda: {"exact": True})

    def _variant(self, key: int | Draws | str, changes: Callable[[], dict[str, Any]]) -> "Programs":
        if key not in self._variants:
            self._variants[key] = dataclasses.replace(self, **changes())
        return self._variants[key]

    @functools.cached_property
    def _variants(self) -> "dict[int | Draws | str, Programs]":
        return {}

    @functools.cached_property
    def _compiled(self) -> dict[tuple[Any, ...], Run]:
        return {}

    @property
    def groups(self) -> int:
        """Device groups, each with slots and pages of its own."""
        return self.mesh.shape["dp"] * self.mesh.shape["ep"]

    @property
    def page_tokens(self) -> int:
        """Positions of a page, over all ranks that share it."""
        return cache_multiple(self.rules, self.mesh.shape)

    @property
    def needs(self) -> tuple[str, ...]:
        """The parts of the parameters that the programs take."""
        drafter = () if self.speculation.module is None else ("drafter",)
        return ("target", *drafter, *(("placement",) if self.experts_move else ()))

    def _compile(
        self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: object, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        return over_mesh(function, self.mesh, in_specs, out_specs, donate)

    @functools.cached_property
    def _weights(self) -> Parameters:
        weights: Parameters = {"target": specs(self.model, self.rules)}
        if self.speculation.module is not None:
            weights["drafter"] = specs(self.speculation.module, self.rules)
        if self.experts_move:
            weights["placement"] = REPLICATED
        return weights

    @functools.cached_property
    def state_specs(self) -> DecodeState:
        """How a state lies on the mesh, as the beginnings of its tree."""
        places: dict[str, Any] = {field.name: REQUESTS for field in dataclasses.fields(DecodeState)}
        places["cache"] = cache_spec(self.rules)
        context = None if self.speculation.context is None else self.speculation.context.spec
        places |= {"context": context, "context_pages": context}
        places["hits"] = REQUESTS if self.speculation.max_depth else None
        places["now"] = None
        counters: dict[str, Any] = {
            "loads": REQUESTS if self.experts_move else None,
            "exchanges": PartitionSpec(AXES) if self.exchange_may_overflow else None,
        }
        places["counters"] = Counters(**counters)
        return DecodeState(**places)

    def _bind(self, parameters: Parameters) -> Step:
        model = bind(self.model, parameters["target"])
        for layer, table in parameters.get("placement", {}).items():
            mixture = model.model.layers[layer].mlp
            assert isinstance(mixture, MixtureOfExperts)
            mixture.placement = nnx.data(table)
        speculation = self.speculation.bound(parameters.get("drafter"))
        counts = self.experts_move, self.exchange_may_overflow
        return Step(model, speculation, self.draws, self.known_ids, *counts, self.exact)

    @functools.cached_property
    def start(self) -> Callable[..., DecodeState]:
        """`start(slots=…, pages=…, capacity=…, shared=…)`: the state with nobody in it.

        Slots and pages count all device groups; no text is longer than `capacity` tokens. Where pages are `shared`
        among prompts, the drafter's context is kept by pages too.
        """

        def start(*, slots: int, pages: int, capacity: int, shared: bool = False) -> DecodeState:
            return initial_state(
                self.model.config,
                slots=slots,
                pages=pages,
                dtype=self.dtype,
                max_depth=self.speculation.max_depth,
                context=self.speculation.empty_context(slots, capacity, self.dtype),
                cache_axis=cache_axis(self.rules),
                cache_ranks=self.page_tokens // PAGE,
                counters=self._no_counts(),
                context_pages=self.speculation.empty_pages(pages, self.page_tokens, self.dtype) if shared else None,
            )

        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.state_specs)
        return jax.jit(start, static_argnames=("slots", "pages", "capacity", "shared"), out_shardings=shardings)

    @functools.cached_property
    def admit(self) -> Callable[[DecodeState, Admissions], DecodeState]:
        """`admit(state, admissions)`: requests come into slots."""
        return self._compile(admit, (self.state_specs, REQUESTS), self.state_specs, donate=(0,))

    @functools.cached_property
    def restore(self) -> Callable[[DecodeState, Hits], DecodeState]:
        """`restore(state, hits)`: the drafter's context of slots whose prompts begin in pages that others have filled.

        Of the pool only the drafter's window is read.
        """
        return self._compile(self.speculation.restore, (self.state_specs, REQUESTS), self.state_specs, donate=(0,))

    def decode(self, slots: int, rounds: int, until_one_ends: bool = False) -> Run:
        """Rounds of every device group's first slots: so many, or as many as are passed where they end early."""

        def decode(step: Step, state: DecodeState, wanted: Int[Array, ""] | None = None) -> DecodeState:
            if wanted is None:
                return jax.lax.fori_loop(0, rounds, lambda _, state: step.round(state), state)

            def running(state: DecodeState) -> Array:
                return all_reduce(state.running.sum(dtype=jnp.int32), BATCH_AXES)

            def once(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
                number, _, state = carry
                state = step.round(state)
                return number + 1, running(state), state

            start = (jnp.int32(0), running(state), state)
            least = start[1] if until_one_ends else 1
            return jax.lax.while_loop(
                lambda carry: (carry[0] < wanted) & (carry[1] >= jnp.maximum(least, 1)), once, start
            )[2]

        more = (REPLICATED,) if self.ends_early else ()
        return self._program(("decode", slots, rounds, until_one_ends), decode, slots, rounds * self.steps, more)

    def chunk(self, slots: int, tiles: int) -> Run:
        """A chunk of some prompts, behind at most so many tiles of cached pages.

        Where a prompt ends its slot becomes ready and its first token is emitted.
        """

        def chunk(step: Step, state: DecodeState, lanes: Lanes) -> DecodeState:
            return step.chunk(state, lanes, tiles)

        return self._program(("chunk", slots, tiles), chunk, slots, 1, (REQUESTS,))

    def mixed(self, slots: int, tiles: int) -> Run:
        """A round of all that run, and in the same forward a chunk of some prompts; see `chunk`."""

        def mixed(step: Step, state: DecodeState, lanes: Lanes) -> DecodeState:
            return step.round(state, lanes, tiles)

        return self._program(("mixed", slots, tiles), mixed, slots, self.steps, (REQUESTS,))

    @property
    def rows(self) -> int:
        """Rows of a request that a round verifies, the root included."""
        return 1 + getattr(self.speculation.drafter, "budget", self.speculation.max_depth)

    @property
    def steps(self) -> int:
        """Tokens that a round gives at most."""
        return self.speculation.max_depth + 1

    def columns(self, width: int) -> Columns:
        """How the host reads a dispatch that emits at most `width` tokens for a slot."""
        return Columns(width, self.steps, self.speculation.max_depth, TOP if self.draws.logprobs else None)

    def _program(
        self, key: tuple[Any, ...], body: Callable[..., DecodeState], slots: int, width: int, more: tuple[Any, ...]
    ) -> Run:
        """A program that runs a body on the first slots, with what it has emitted as an array for the host.

        `more` says how what the body takes besides lies on the mesh.
        """

        def run(
            parameters: Parameters, state: DecodeState, now: Dispatch, *given: Any
        ) -> tuple[DecodeState, tuple[Array, ...]]:
            begun = self._begin(now, slots, width)
            first = dataclasses.replace(first_slots(state, slots), now=begun)
            first = body(self._bind(parameters), first, *given)
            told = (self._told(first, begun, state.lengths.shape[0], width),)
            if first.fresh.prompt is not None:
                told += (all_gather(first.fresh.prompt.pack(), BATCH_AXES),)
            return with_first_slots(state, first), told

        if key not in self._compiled:
            run.__name__ = key[0]  # what profiles, dumps and the compilation cache call it
            in_specs = (self._weights, self.state_specs, REQUESTS, *more)
            self._compiled[key] = self._compile(run, in_specs, (self.state_specs, REPLICATED), donate=(1,))
        return self._compiled[key]

    def _begin(self, now: Dispatch, slots: int, width: int) -> Dispatch:
        """The first slots' part of a dispatch, with room for what it emits."""
        counts = jnp.zeros(slots, jnp.int32)
        told = jnp.zeros((slots, width)) if self.draws.logprobs else None
        top = None
        if self.draws.logprobs:
            top = Top(jnp.zeros((slots, width, TOP), jnp.int32), jnp.zeros((slots, width, TOP)))
        fresh = Fresh(jnp.zeros((slots, width), jnp.int32), counts, told, top)
        return Dispatch(now.pages[:slots], now.active[:slots], fresh)

    def _told(self, state: DecodeState, begun: Dispatch, slots: int, width: int) -> Int[Array, "all_slots columns"]:
        """What `Columns` unpacks, of all slots of all device groups."""
        assert state.now is not None
        fresh = state.fresh
        values: dict[str, Any] = {
            "counts": fresh.counts,
            "overflowed": begun.active & ~state.now.active,
            "tokens": fresh.tokens,
            "logprobs": fresh.logprobs,
            **{name: getattr(state, name) for name in ("finished", "failed", "nodes", "round_tokens", "hits")},
        }
        if fresh.top is not None:
            values |= {"top_ids": fresh.top.ids, "top_logprobs": fresh.top.logprobs}
        if state.counters.exchanges is not None:
            # All ep ranks of an exchange count it.
            counted = all_reduce(state.counters.exchanges[0], AXES) // axis_size("ep")
            both = jnp.broadcast_to(counted, (len(fresh.counts), 2))
            values |= {"exchanges": both[:, 0], "overflows": both[:, 1]}
        packed = self.columns(width).pack(values)
        return all_gather(jnp.pad(packed, [(0, slots - len(packed)), (0, 0)]), BATCH_AXES)

    @functools.cached_property
    def round(self) -> Callable[[Parameters, DecodeState, Dispatch], DecodeState]:
        """`round(parameters, state, now)`: one round of all slots, the body of `decode`'s loop, for profiling."""
        return self._timed(Step.round, donate=(1,))

    @functools.cached_property
    def parts(self) -> tuple[Callable[[Parameters, DecodeState, Dispatch], Any], ...]:
        """Drafting alone, drafting and verifying, and a whole round, for timing: nothing is donated or kept."""

        return (
            self._timed(Step.propose, REQUESTS),
            self._timed(lambda step, state: step.verify(state, step.propose(state))[0], REQUESTS),
            self._timed(Step.round),
        )

    def _timed(self, body: Callable[..., Any], out: Any = None, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """A part of a round on all slots; a state among what it gives is without what belongs to the dispatch."""

        def run(parameters: Parameters, state: DecodeState, now: Dispatch) -> Any:
            now = self._begin(now, state.lengths.shape[0], self.steps)
            result = body(self._bind(parameters), dataclasses.replace(state, now=now))
            return dataclasses.replace(result, now=None) if isinstance(result, DecodeState) else result

        in_specs = (self._weights, self.state_specs, REQUESTS)
        return self._compile(run, in_specs, self.state_specs if out is None else out, donate)

    def _no_counts(self) -> Counters:
        """Counters of the whole mesh before anything is counted."""
        shape = (self.groups, len(self.model.slot_experts), self.model.config.n_routed_experts)
        return Counters(
            jnp.zeros(shape, jnp.int32) if self.experts_move else None,
            jnp.zeros((self.mesh.size, 2), jnp.int32) if self.exchange_may_overflow else None,
        )
