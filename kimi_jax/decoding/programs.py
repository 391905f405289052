"""The compiled programs of decoding: prefill of a chunk, and many rounds in one dispatch.

Each is one `shard_map` over the whole mesh inside one `jit`, with the state donated: no collective is added by the
compiler, no weight or cache is copied, and the host is asked nothing between the first round and the last.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from kimi_jax.decoding.sampling import Sampling, next_tokens
from kimi_jax.decoding.state import FINE, DecodeState, Snapshot, emit, initial_state
from kimi_jax.model.cache import commit
from kimi_jax.model.transformer import CausalLM, Rows, causal_rows
from kimi_jax.parallel.collectives import all_gather, all_reduce
from kimi_jax.parallel.sharding import REQUESTS
from kimi_jax.parameters import Parameters, Rules, bind, specs

REPLICATED = PartitionSpec()
BATCH_AXES = ("dp", "ep")


@dataclasses.dataclass(frozen=True)
class Programs:
    """Programs for one model on one mesh with one way of sampling; compiled at first use for each batch shape."""

    model: CausalLM
    mesh: Mesh
    rules: Rules
    sampling: Sampling
    stop_ids: tuple[int, ...]
    dtype: DTypeLike

    @property
    def request_multiple(self) -> int:
        """Batches are padded to a multiple of this."""
        return self.mesh.shape["dp"] * self.mesh.shape["ep"]

    def _compile(
        self, function: Callable, in_specs: tuple, out_specs: object, donate: tuple[int, ...] = ()
    ) -> Callable:
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    @functools.cached_property
    def _weights(self) -> Parameters:
        return specs(self.model, self.rules)

    @functools.cached_property
    def start(self) -> Callable[..., DecodeState]:
        """`start(keys, limits, capacity=…, max_new_tokens=…)`: the state before anything has run."""

        @functools.partial(jax.jit, static_argnames=("capacity", "max_new_tokens"))
        def start(keys: Array, limits: Array, *, capacity: int, max_new_tokens: int) -> DecodeState:
            local = functools.partial(
                initial_state, self.model.config, capacity=capacity, max_new_tokens=max_new_tokens, dtype=self.dtype
            )
            mapped = jax.shard_map(
                lambda keys, limits: local(keys=keys, limits=limits),
                mesh=self.mesh, in_specs=(REQUESTS, REQUESTS), out_specs=REQUESTS, check_vma=False,
            )  # fmt: skip
            return mapped(keys, limits)

        return start

    @functools.cached_property
    def prefill(self) -> Callable[[Parameters, DecodeState, Array, Array], DecodeState]:
        """`prefill(parameters, state, tokens [requests, chunk], counts)`: runs a chunk of each prompt.

        After a prompt's last chunk its first token has been drawn; counts of 0 leave a request as it is.
        """

        def prefill(
            parameters: Parameters, state: DecodeState, tokens: Int[Array, "requests chunk"],
            counts: Int[Array, " requests"],
        ) -> DecodeState:  # fmt: skip
            model = bind(self.model, parameters)
            rows = causal_rows(tokens, state.lengths, counts)
            output = model.model(rows, state.cache)
            last = jnp.maximum(counts - 1, 0)[:, None]
            hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)
            drawn, finite = self._draw(model, state, hidden, jnp.take_along_axis(rows.positions, last, axis=1))
            run = counts > 0
            state = dataclasses.replace(
                state,
                cache=commit(state.cache, output.latents, None, state.lengths),
                lengths=state.lengths + counts,
                anchors=jnp.where(run, drawn[:, 0], state.anchors),
            )
            return _record_failure(state, run & ~finite[:, 0])

        in_specs = (self._weights, REQUESTS, REQUESTS, REQUESTS)
        return self._compile(prefill, in_specs, REQUESTS, donate=(1,))

    @functools.cached_property
    def decode(self) -> Callable[[Parameters, DecodeState, Array], tuple[DecodeState, Snapshot]]:
        """`decode(parameters, state, rounds)`: up to that many rounds, fewer when every request has finished.

        With no round run before, the first token drawn by prefill is emitted first.
        """

        def decode(parameters: Parameters, state: DecodeState, rounds: Int[Array, ""]) -> tuple[DecodeState, Snapshot]:
            model = bind(self.model, parameters)
            first = (state.counts == 0) & (state.rounds == 0)
            state = emit(state, state.anchors[:, None], first.astype(jnp.int32), self.stop_ids)

            def running(state: DecodeState) -> Array:
                return all_reduce((~state.finished).any().astype(jnp.int32), BATCH_AXES)

            def body(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
                step, _, state = carry
                state = self._round(model, state)
                return step + 1, running(state), state

            _, _, state = jax.lax.while_loop(
                lambda carry: (carry[0] < rounds) & (carry[1] > 0), body, (jnp.int32(0), running(state), state)
            )
            gathered = (state.emitted, state.counts, state.finished, state.failed, state.rounds)
            return state, Snapshot(*(all_gather(x, BATCH_AXES) for x in gathered))

        in_specs = (self._weights, REQUESTS, REPLICATED)
        return self._compile(decode, in_specs, (REQUESTS, REPLICATED), donate=(1,))

    def _round(self, model: CausalLM, state: DecodeState) -> DecodeState:
        """One round without a drafter: the anchor alone is run, and the token after it drawn."""
        active = ~state.finished
        rows = Rows(state.anchors[:, None], state.lengths[:, None], active[:, None, None], state.lengths)
        output = model.model(rows, state.cache)
        drawn, finite = self._draw(model, state, output.hidden, rows.positions)
        state = dataclasses.replace(
            state,
            cache=commit(state.cache, output.latents, None, state.lengths),
            lengths=state.lengths + active,
            anchors=jnp.where(active, drawn[:, 0], state.anchors),
            rounds=state.rounds + active,
        )
        state = emit(state, drawn, active.astype(jnp.int32), self.stop_ids)
        return _record_failure(state, active & ~finite[:, 0])

    def _draw(self, model: CausalLM, state: DecodeState, hidden: Array, positions: Array) -> tuple[Array, Array]:
        logits = model.logits(hidden)
        with jax.named_scope("sampling"):
            return next_tokens(logits, positions, state.keys, self.sampling)


def _record_failure(state: DecodeState, failed: Array) -> DecodeState:
    """Ends a request whose logits were not finite and keeps the position for the report."""
    first = failed & (state.failed == FINE)
    return dataclasses.replace(
        state, failed=jnp.where(first, state.lengths - 1, state.failed), finished=state.finished | failed
    )
