"""The compiled programs of decoding: prefill of a chunk, and many rounds in one dispatch.

Each is one `shard_map` over the whole mesh inside one `jit`, with the state donated: no collective is added by the
compiler, no weight or cache is copied, and the host is asked nothing between the first round and the last.

A round drafts a tree, verifies all its rows in one forward of the target, walks the tree along the target's own
tokens, and commits the accepted path. Without a drafter the tree is its root: that is plain decoding.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ddtree.acceptance import Acceptance, emit
from kimi_jax.ddtree.tree import DraftTree
from kimi_jax.decoding.sampling import Sampling, next_tokens, only_known
from kimi_jax.decoding.speculation import Speculation
from kimi_jax.decoding.state import FINE, Counters, DecodeState, Snapshot, initial_state
from kimi_jax.model.cache import Latents, commit
from kimi_jax.model.moe import MixtureOfExperts
from kimi_jax.model.transformer import CausalLM, Output, Rows, causal_rows
from kimi_jax.parallel.collectives import all_gather, all_reduce, axis_size
from kimi_jax.parallel.counters import counting
from kimi_jax.parallel.sharding import REQUESTS, cache_axis, cache_multiple, cache_spec
from kimi_jax.parameters import Parameters, Rules, bind, specs
from meshes.presets import AXES

REPLICATED = PartitionSpec()
BATCH_AXES = ("dp", "ep")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What the target says of a draft tree; shapes depend on the tree's depth, not on its rows."""

    acceptance: Acceptance
    """Batched over requests."""
    latents: list[Latents]
    """Of the rows on the accepted path, in order; what follows the path is arbitrary."""
    taps: list[Float[Array, "requests steps hidden"]]
    finite: Bool[Array, " requests"]
    """Whether all logits on the path were finite."""
    counted: Counters


@dataclasses.dataclass(frozen=True)
class Programs:
    """Programs for one model on one mesh with one way of sampling; compiled at first use for each batch shape.

    Parameters are passed as `{"target": …}`, with `"drafter"` beside it where the drafter has weights, and
    `"placement"`, tables by layer, where experts move.
    """

    model: CausalLM
    mesh: Mesh
    rules: Rules
    sampling: Sampling
    stop_ids: tuple[int, ...]
    dtype: DTypeLike
    speculation: Speculation = dataclasses.field(default_factory=Speculation)
    experts_move: bool = False
    """The placement of experts is an argument and not part of the programs, and their loads are counted."""
    exchange_may_overflow: bool = False
    """Count the exchanges that took the exact path."""
    known_ids: int | None = None
    """Ids below this have a meaning in the tokenizer, and no other is drawn; None where all rows of the head have."""

    def with_rows(self, rows: int) -> "Programs":
        """The same with draft trees of so many rows, the root included. It takes this one's states; compiled once."""
        if rows not in self._by_rows:
            self._by_rows[rows] = dataclasses.replace(self, speculation=self.speculation.with_budget(rows - 1))
        return self._by_rows[rows]

    @functools.cached_property
    def _by_rows(self) -> "dict[int, Programs]":
        return {}

    @property
    def request_multiple(self) -> int:
        """Batches are padded to a multiple of this."""
        return self.mesh.shape["dp"] * self.mesh.shape["ep"]

    @property
    def cache_multiple(self) -> int:
        """Cached positions are padded to a multiple of this."""
        return cache_multiple(self.rules, self.mesh.shape)

    @property
    def needs(self) -> tuple[str, ...]:
        """The parts of the parameters that the programs take."""
        drafter = () if self.speculation.module is None else ("drafter",)
        return ("target", *drafter, *(("placement",) if self.experts_move else ()))

    def _compile(
        self, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: object, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

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
        places["context"] = None if self.speculation.context is None else self.speculation.context.spec
        places["hits"] = REQUESTS if self.speculation.max_depth else None
        counters: dict[str, Any] = {
            "loads": REQUESTS if self.experts_move else None,
            "exchanges": PartitionSpec(AXES) if self.exchange_may_overflow else None,
        }
        places["counters"] = Counters(**counters)
        return DecodeState(**places)

    def _bind(self, parameters: Parameters) -> tuple[CausalLM, Speculation]:
        model = bind(self.model, parameters["target"])
        for layer, table in parameters.get("placement", {}).items():
            mixture = model.model.layers[layer].mlp
            assert isinstance(mixture, MixtureOfExperts)
            mixture.placement = nnx.data(table)
        return model, self.speculation.bound(parameters.get("drafter"))

    @functools.cached_property
    def start(self) -> Callable[..., DecodeState]:
        """`start(keys, limits, capacity=…, max_new_tokens=…)`: the state before anything has run."""

        def start(keys: Array, limits: Array, *, capacity: int, max_new_tokens: int) -> DecodeState:
            return initial_state(
                self.model.config,
                keys=keys,
                limits=limits,
                capacity=capacity,
                max_new_tokens=max_new_tokens,
                dtype=self.dtype,
                max_depth=self.speculation.max_depth,
                context=self.speculation.empty_context(limits.shape[0], capacity, self.dtype),
                cache_axis=cache_axis(self.rules),
                counters=self._no_counts(),
            )

        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.state_specs)
        return jax.jit(start, static_argnames=("capacity", "max_new_tokens"), out_shardings=shardings)

    @functools.cached_property
    def prefill(self) -> Callable[[Parameters, DecodeState, Array, Array], DecodeState]:
        """`prefill(parameters, state, tokens [requests, chunk], counts)`: runs a chunk of each prompt.

        After a prompt's last chunk its first token has been drawn; counts of 0 leave a request as it is.
        """

        def prefill(
            parameters: Parameters, state: DecodeState, tokens: Int[Array, "requests chunk"],
            counts: Int[Array, " requests"],
        ) -> DecodeState:  # fmt: skip
            model, speculation = self._bind(parameters)
            rows = causal_rows(tokens, state.lengths, counts)
            output, counted = self._forward(model, rows, state, speculation)
            last = jnp.maximum(counts - 1, 0)[:, None]
            hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)
            drawn, finite = self._draw(model, state, hidden, jnp.take_along_axis(rows.positions, last, axis=1))
            run = counts > 0
            state = dataclasses.replace(
                state,
                cache=commit(state.cache, output.latents, state.lengths),
                context=speculation.extend(state.context, output.taps, state.lengths, counts),
                lengths=state.lengths + counts,
                counters=jax.tree.map(jnp.add, state.counters, counted),
                anchors=jnp.where(run, drawn[:, 0], state.anchors),
            )
            return _record_failure(state, run & ~finite[:, 0])

        in_specs = (self._weights, self.state_specs, REQUESTS, REQUESTS)
        return self._compile(prefill, in_specs, self.state_specs, donate=(1,))

    @functools.cached_property
    def decode(self) -> Callable[[Parameters, DecodeState, Array | np.integer], tuple[DecodeState, Snapshot]]:
        """`decode(parameters, state, rounds)`: up to that many rounds, fewer when every request has finished.

        Before the very first round the token drawn by prefill is emitted.
        """

        def decode(parameters: Parameters, state: DecodeState, rounds: Int[Array, ""]) -> tuple[DecodeState, Snapshot]:
            model, speculation = self._bind(parameters)
            first = (state.counts == 0) & ~state.finished
            state = self._emit(state, state.anchors[:, None], first.astype(jnp.int32))

            def running(state: DecodeState) -> Array:
                return all_reduce((~state.finished).any().astype(jnp.int32), BATCH_AXES)

            def body(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
                step, _, state = carry
                state = self._round(model, speculation, state)
                return step + 1, running(state), state

            _, _, state = jax.lax.while_loop(
                lambda carry: (carry[0] < rounds) & (carry[1] > 0), body, (jnp.int32(0), running(state), state)
            )
            return state, _snapshot(state)

        in_specs = (self._weights, self.state_specs, REPLICATED)
        return self._compile(decode, in_specs, (self.state_specs, REPLICATED), donate=(1,))

    @functools.cached_property
    def parts(self) -> tuple[Callable[[Parameters, DecodeState], Any], ...]:
        """Drafting alone, drafting and verifying, and a whole round, for timing: nothing is donated or kept."""

        def draft(parameters: Parameters, state: DecodeState) -> DraftTree:
            model, speculation = self._bind(parameters)
            return speculation.propose(model, state)

        def verify(parameters: Parameters, state: DecodeState) -> Verified:
            model, speculation = self._bind(parameters)
            tree = speculation.propose(model, state)
            return self._verify(model, speculation, state, tree)

        def whole(parameters: Parameters, state: DecodeState) -> DecodeState:
            return self._round(*self._bind(parameters), state)

        in_specs = (self._weights, self.state_specs)
        return (
            self._compile(draft, in_specs, REQUESTS),
            self._compile(verify, in_specs, REQUESTS),
            self._compile(whole, in_specs, self.state_specs),
        )

    @functools.cached_property
    def round(self) -> Callable[[Parameters, DecodeState], DecodeState]:
        """`round(parameters, state)`: one round alone, the body of `decode`'s loop, for profiling."""

        def round_(parameters: Parameters, state: DecodeState) -> DecodeState:
            return self._round(*self._bind(parameters), state)

        return self._compile(round_, (self._weights, self.state_specs), self.state_specs, donate=(1,))

    def _round(self, model: CausalLM, speculation: Speculation, state: DecodeState) -> DecodeState:
        """Draft, verify, accept, commit."""
        active = ~state.finished
        tree = speculation.propose(model, state)
        verified = self._verify(model, speculation, state, tree)
        acceptance = verified.acceptance
        accepted = jnp.where(active, acceptance.length, 0)
        state = dataclasses.replace(
            state,
            cache=commit(state.cache, verified.latents, state.lengths),
            context=speculation.extend(state.context, verified.taps, state.lengths, accepted),
            lengths=state.lengths + accepted,
            anchors=jnp.where(active, acceptance.bonus, state.anchors),
            hits=_reached(state.hits, accepted - 1),
            nodes=state.nodes + jnp.where(active, tree.num_nodes, 0),
            counters=jax.tree.map(jnp.add, state.counters, verified.counted),
        )
        emitted = self._emit(state, acceptance.tokens, accepted)
        new = emitted.counts - state.counts
        state = dataclasses.replace(emitted, round_tokens=_reached(state.round_tokens, new))
        return _record_failure(state, active & ~verified.finite)

    def _verify(self, model: CausalLM, speculation: Speculation, state: DecodeState, tree: DraftTree) -> Verified:
        """One forward over the tree's rows; only the accepted path leaves it."""
        active = ~state.finished
        rows = Rows(
            tree.tokens, state.lengths[:, None] + tree.depths, tree.ancestors & active[:, None, None], state.lengths
        )
        output, counted = self._forward(model, rows, state, speculation)
        drawn, finite = self._draw(model, state, output.hidden, rows.positions)
        acceptance = speculation.accept(tree, drawn, state)

        def on_path(x: Array) -> Array:
            return jnp.take_along_axis(x, acceptance.path[..., None], axis=1)

        return Verified(
            acceptance=acceptance,
            latents=jax.tree.map(on_path, output.latents),
            taps=jax.tree.map(on_path, output.taps),
            finite=jnp.take_along_axis(finite, acceptance.path, axis=1).all(1),
            counted=counted,
        )

    def _forward(
        self, model: CausalLM, rows: Rows, state: DecodeState, speculation: Speculation
    ) -> tuple[Output, Counters]:
        """One forward, and what this device counted in it."""
        with counting(loads=self.experts_move) as counted:
            output = model.model(rows, state.cache, speculation.tap_layers)
        loads = jnp.stack(counted.loads)[None] if self.experts_move else None
        if not self.exchange_may_overflow:
            return output, Counters(loads)
        overflows = jnp.stack([jnp.int32(0), *counted.overflows]).sum(dtype=jnp.int32)
        return output, Counters(loads, jnp.stack([jnp.int32(len(counted.overflows)), overflows])[None])

    def _no_counts(self) -> Counters:
        """Counters of the whole mesh before anything is counted."""
        shape = (self.request_multiple, len(self.model.slot_experts), self.model.config.n_routed_experts)
        return Counters(
            jnp.zeros(shape, jnp.int32) if self.experts_move else None,
            jnp.zeros((self.mesh.size, 2), jnp.int32) if self.exchange_may_overflow else None,
        )

    def _emit(
        self, state: DecodeState, tokens: Int[Array, "requests steps"], new: Int[Array, " requests"]
    ) -> DecodeState:
        """Appends the first `new` of `tokens` to each text, up to its limit or a stop token."""
        stops = jnp.asarray(self.stop_ids, jnp.int32)
        emission = jax.vmap(lambda *args: emit(args[0], args[1], stops, args[2]))(
            tokens, new, state.limits - state.counts
        )
        steps = jnp.arange(tokens.shape[1])
        columns = jnp.where(steps < emission.count[:, None], state.counts[:, None] + steps, state.emitted.shape[1])
        emitted = state.emitted.at[jnp.arange(tokens.shape[0])[:, None], columns].set(tokens, mode="drop")
        return dataclasses.replace(
            state, emitted=emitted, counts=state.counts + emission.count, finished=state.finished | emission.finished
        )

    def _draw(self, model: CausalLM, state: DecodeState, hidden: Array, positions: Array) -> tuple[Array, Array]:
        logits = model.logits(hidden)
        with jax.named_scope("sampling"):
            return next_tokens(only_known(logits, self.known_ids), positions, state.keys, self.sampling)


def _reached[Counts: Array | None](counts: Counts, reached: Int[Array, " requests"]) -> Counts:
    """Counts one more for every n below what a request reached this round; None stays None."""
    return jax.tree.map(lambda x: x + (jnp.arange(x.shape[1]) < reached[:, None]), counts)


def _snapshot(state: DecodeState) -> Snapshot:
    """What the host reads, the same on every device."""
    names = [field.name for field in dataclasses.fields(Snapshot) if field.name not in ("exchanges", "overflows")]
    own = {name: getattr(state, name) for name in names}
    snapshot = Snapshot(**jax.tree.map(lambda x: all_gather(x, BATCH_AXES), own))
    if state.counters.exchanges is None:
        return snapshot
    # All ep ranks of an exchange count it.
    exchanges, overflows = all_reduce(state.counters.exchanges[0], AXES) // axis_size("ep")
    return dataclasses.replace(snapshot, exchanges=exchanges, overflows=overflows)


def _record_failure(state: DecodeState, failed: Array) -> DecodeState:
    """Ends a request whose logits were not finite and keeps the position for the report."""
    first = failed & (state.failed == FINE)
    return dataclasses.replace(
        state, failed=jnp.where(first, state.lengths - 1, state.failed), finished=state.finished | failed
    )
