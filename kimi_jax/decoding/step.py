"""What one dispatch computes on a device: rounds, and chunks of prompts.

A round drafts a tree, verifies all its rows in one forward of the target, walks the tree along the target's own
tokens, and commits the accepted path. Without a drafter the tree is its root: that is plain decoding. A mixed step
runs a chunk of waiting prompts in the same forward as a round, so that the experts' weights are read once for both.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ddtree.acceptance import Acceptance, emit
from kimi_jax.ddtree.tree import DraftTree, truncate
from kimi_jax.decoding.sampling import Draws, log_probabilities, most_likely, next_tokens, not_yet, only_known
from kimi_jax.decoding.speculation import Speculation
from kimi_jax.decoding.state import FINE, Asked, Counters, DecodeState, Dispatch, Fresh, Lanes, Scored, Top
from kimi_jax.model.pages import commit, places_of
from kimi_jax.model.rows import Rows
from kimi_jax.model.transformer import CausalLM, Output
from kimi_jax.parallel.collectives import all_reduce
from kimi_jax.parallel.counters import OnOverflow, counting

TOP = 20
"""Most likely tokens told of each token where log-probabilities are asked."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What the target says of some rows."""

    tokens: Int[Array, "requests rows"]
    finite: Bool[Array, "requests rows"]
    logits: Float[Array, "requests rows vocab_local"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What the target says of a draft tree; shapes depend on the tree's depth, not on its rows."""

    acceptance: Acceptance
    """Batched over slots."""
    output: Output
    """Of the rows on the accepted path, in order; what follows the path is arbitrary."""
    finite: Bool[Array, " slots"]
    """Whether all logits on the path were finite."""
    overflowed: Bool[Array, " slots"]
    """Whether an exchange did not hold its rows, so that nothing of this counts; the same on all ranks that see it."""
    logits: Float[Array, "slots steps vocab_local"] | None
    """Of the rows on the path; None in programs that tell no log-probabilities."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Model and drafter with their arrays, inside the mesh; its methods take this device's slots and give them back."""

    model: CausalLM
    speculation: Speculation
    draws: Draws
    known_ids: int | None
    counts_loads: bool
    counts_overflows: bool
    exact: bool = False
    """Rounds take the exact path of exchanges whose buffers may overflow. Other rounds that overflow give nothing."""

    def propose(self, state: DecodeState) -> DraftTree:
        """The trees of all slots, each cut to what its request allows."""
        tree = self.speculation.propose(self.model, state)
        return jax.vmap(truncate)(tree, state.asked.budgets) if tree.max_depth else tree

    def round(self, state: DecodeState, lanes: Lanes | None = None, tiles: int = 0) -> DecodeState:
        """Draft, verify, accept, commit; and a chunk of other slots' prompts on the way.

        A round without a chunk in which an exchange overflows leaves all texts as they are, and the slots inactive for
        the rest of the dispatch: the host runs it again by the exact program.
        """
        tree = self.propose(state)
        verified, state, chunk = self.verify(state, tree, lanes, tiles)
        running = state.running & ~verified.overflowed
        acceptance, output = verified.acceptance, verified.output
        accepted = jnp.where(running, acceptance.length, 0)
        places = [places_of(state.cache, state.pages, state.lengths, accepted, acceptance.path.shape[1])]
        latents = [output.latents]
        if lanes is not None and chunk is not None:
            rows, below, _ = chunk
            latents.append(below.latents)
            places.append(lanes.places(state, rows, before=places[0].pages.size))
        state = self.speculation.extend(state, output.taps, state.lengths, accepted)
        state = dataclasses.replace(
            state,
            cache=commit(state.cache, latents, places),
            lengths=state.lengths + accepted,
            anchors=jnp.where(running, acceptance.bonus, state.anchors),
            hits=_reached(state.hits, accepted - 1),
            nodes=state.nodes + jnp.where(running, tree.num_nodes, 0),
        )
        state, new = self._emit(state, acceptance.tokens, accepted, verified.logits)
        now = cast(Dispatch, state.now)
        now = dataclasses.replace(now, active=now.active & ~verified.overflowed)
        state = dataclasses.replace(state, now=now, round_tokens=_reached(state.round_tokens, new))
        state = _record_failure(state, running & ~verified.finite)
        return state if lanes is None or chunk is None else self._advance(state, lanes, *chunk)

    def chunk(self, state: DecodeState, lanes: Lanes, tiles: int) -> DecodeState:
        """A chunk of some prompts, behind at most so many tiles of cached pages."""
        rows = lanes.rows(state, tiles)
        (output,), state, _ = self._forward([rows], state)
        (drawn,) = self._draw([self._last_rows(state, lanes, rows, output)])
        state = dataclasses.replace(state, cache=commit(state.cache, [output.latents], [lanes.places(state, rows)]))
        return self._advance(state, lanes, rows, output, drawn)

    def verify(
        self, state: DecodeState, tree: DraftTree, lanes: Lanes | None = None, tiles: int = 0
    ) -> tuple[Verified, DecodeState, tuple[Rows, Output, Drawn] | None]:
        """One forward over the trees' rows, and over a chunk's where there is one; only the accepted path leaves it."""
        running = state.running
        # A slot that does not run has no length either: its pages may be another request's by now.
        lengths = jnp.where(running, state.lengths, 0)
        ancestors = tree.ancestors & running[:, None, None]
        groups = [Rows(tree.tokens, lengths[:, None] + tree.depths, ancestors, lengths, state.pages)]
        if lanes is not None:
            groups.append(lanes.rows(state, tiles))
        # A chunk's rows are never thrown away: the host counts on its progress, and one look a layer is little for it.
        outputs, state, overflowed = self._forward(groups, state, self._of_rounds if lanes is None else "branch")
        wanted = [(state.asked, outputs[0].hidden, groups[0].positions)]
        if lanes is not None:
            wanted.append(self._last_rows(state, lanes, groups[1], outputs[1]))
        drawn = self._draw(wanted)
        acceptance = self.speculation.accept(tree, drawn[0].tokens, state)

        def on_path(x: Array) -> Array:
            return jnp.take_along_axis(x, acceptance.path[..., None], axis=1)

        verified = Verified(
            acceptance=acceptance,
            output=jax.tree.map(on_path, outputs[0]),
            finite=jnp.take_along_axis(drawn[0].finite, acceptance.path, axis=1).all(1),
            overflowed=jnp.broadcast_to(overflowed, running.shape),
            logits=on_path(drawn[0].logits) if self.draws.logprobs else None,
        )
        return verified, state, (groups[1], outputs[1], drawn[1]) if lanes is not None else None

    def _last_rows(self, state: DecodeState, lanes: Lanes, rows: Rows, output: Output) -> tuple[Asked, Array, Array]:
        """Each lane's request, and its last row's hidden state and position, as `_draw` takes them."""
        last = jnp.maximum(lanes.counts - 1, 0)[:, None]
        hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)
        return jax.tree.map(lanes.of, state.asked), hidden, jnp.take_along_axis(rows.positions, last, axis=1)

    def _advance(self, state: DecodeState, lanes: Lanes, rows: Rows, output: Output, drawn: Drawn) -> DecodeState:
        """What a chunk changes of its slots, beside the pool."""
        done = lanes.last & (lanes.counts > 0)
        nobody = jnp.zeros_like(state.finished)
        state = self.speculation.extend(state, output.taps, rows.lengths, lanes.counts, lanes.slots)
        state = dataclasses.replace(
            state,
            lengths=lanes.put(state.lengths, rows.lengths + lanes.counts),
            anchors=lanes.put(state.anchors, drawn.tokens[:, 0]),
            ready=lanes.put(state.ready, done),
        )
        logits = None
        if self.draws.logprobs:
            empty = jnp.zeros((len(nobody), *drawn.logits.shape[1:]), drawn.logits.dtype)
            logits = lanes.put(empty, drawn.logits)
        state, _ = self._emit(state, state.anchors[:, None], lanes.put(nobody, done).astype(jnp.int32), logits)
        if lanes.following is not None and self.draws.prompt is not None:
            now = cast(Dispatch, state.now)
            fresh = dataclasses.replace(state.fresh, prompt=self._score(output, lanes.following, self.draws.prompt))
            state = dataclasses.replace(state, now=dataclasses.replace(now, fresh=fresh))
        # Of earlier rows only the hidden states tell: their latents are committed as zeros where they are not finite.
        finite = jnp.isfinite(output.hidden).all(-1) | ~rows.valid
        return _record_failure(state, lanes.put(nobody, (lanes.counts > 0) & ~(finite.all(1) & drawn.finite[:, 0])))

    def _score(self, output: Output, following: Int[Array, "lanes rows"], top: int) -> Scored:
        """What the target says of the token behind every row of a chunk."""
        logits = self.model.logits(output.hidden)
        with jax.named_scope("sampling"):
            logprobs, ids, best = log_probabilities(logits, following, top)
            return Scored(logprobs, most_likely(logits)[0] == following, Top(ids, best))

    @property
    def _of_rounds(self) -> OnOverflow:
        return "exact" if self.exact else "report"

    def _forward(
        self, groups: Sequence[Rows], state: DecodeState, on_overflow: OnOverflow = "branch"
    ) -> tuple[list[Output], DecodeState, Bool[Array, ""]]:
        """One forward, the state with what this device counted in it, and whether all of that is worth nothing."""
        with counting(self.counts_loads, on_overflow) as counted:
            outputs = self.model.model.of_groups(groups, state.cache, self.speculation.tap_layers)
        overflows = jnp.stack([jnp.int32(0), *counted.overflows]).sum(dtype=jnp.int32)
        overflowed = jnp.bool_(False)
        if counted.overflows and on_overflow == "report":
            overflowed = all_reduce(overflows, "tp") > 0  # each tp rank has its own exchange, and all must do the same
        new = Counters(jnp.stack(counted.loads)[None] * ~overflowed if self.counts_loads else None)
        if self.counts_overflows:
            exchanges = jnp.stack([jnp.int32(len(counted.overflows)), overflows])[None]
            new = dataclasses.replace(new, exchanges=exchanges)
        return outputs, dataclasses.replace(state, counters=jax.tree.map(jnp.add, state.counters, new)), overflowed

    def _emit(
        self,
        state: DecodeState,
        tokens: Int[Array, "slots steps"],
        new: Int[Array, " slots"],
        logits: Float[Array, "slots steps vocab_local"] | None,
    ) -> tuple[DecodeState, Int[Array, " slots"]]:
        """Appends the first `new` of `tokens` to each text, up to its limit or a stop token; and how many these are."""
        fresh, asked = state.fresh, state.asked
        emission = jax.vmap(emit)(tokens, new, asked.stops, asked.limits - state.counts)
        steps = jnp.arange(tokens.shape[1])
        columns = jnp.where(steps < emission.count[:, None], fresh.counts[:, None] + steps, fresh.tokens.shape[1])

        def put(old: Array, values: Array) -> Array:
            return old.at[jnp.arange(len(tokens))[:, None], columns].set(values, mode="drop")

        told: Any = (None, None)
        if logits is not None:
            told = log_probabilities(logits, jnp.maximum(tokens, 0), TOP)
            told = (told[0], Top(*told[1:]))
        fresh = Fresh(
            put(fresh.tokens, tokens),
            fresh.counts + emission.count,
            *jax.tree.map(put, (fresh.logprobs, fresh.top), told),
        )
        state = dataclasses.replace(
            state,
            counts=state.counts + emission.count,
            finished=state.finished | (emission.finished & state.ready),
            now=dataclasses.replace(cast(Dispatch, state.now), fresh=fresh),
        )
        return state, emission.count

    def _draw(self, wanted: Sequence[tuple[Asked, Array, Array]]) -> list[Drawn]:
        """Each row's next token, for several groups of requests with hidden states and positions of some rows.

        The head runs over all of them at once, so that its weights are read once.
        """
        flat = [hidden.reshape(-1, hidden.shape[-1]) for _, hidden, _ in wanted]
        logits = self.model.logits(flat[0] if len(flat) == 1 else jnp.concatenate(flat))
        found, first = [], 0
        for (asked, _, positions), rows in zip(wanted, flat, strict=True):
            part = logits[first : first + len(rows)].reshape(*positions.shape, -1)
            first += len(rows)
            with jax.named_scope("sampling"):
                known = only_known(part, self.known_ids)
                if self.draws.kind == "filters":
                    known = not_yet(known, asked.stops, positions + 1 < asked.least[:, None])
                drawn = next_tokens(known, positions, asked.keys, asked.sampling, self.draws.kind)
            found.append(Drawn(*drawn, part))
        return found


def _reached[Counts: Array | None](counts: Counts, reached: Int[Array, " slots"]) -> Counts:
    """Counts one more for every n below what a request reached this round; None stays None."""
    return jax.tree.map(lambda x: x + (jnp.arange(x.shape[1]) < reached[:, None]), counts)


def _record_failure(state: DecodeState, failed: Bool[Array, " slots"]) -> DecodeState:
    """Ends a request whose logits were not finite and keeps the position for the report."""
    first = failed & (state.failed == FINE)
    return dataclasses.replace(
        state, failed=jnp.where(first, state.lengths - 1, state.failed), finished=state.finished | failed
    )
