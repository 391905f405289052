"""What a round proposes: nothing but the anchor, a chain, or a draft tree."""

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from kimi_jax.ddtree.acceptance import Acceptance, walk
from kimi_jax.ddtree.budget import ROW_COUNTS, CostTable, choose_num_nodes, drafting_pays, row_count_index, share_nodes
from kimi_jax.ddtree.tree import DraftTree, build_lattice, chain, greedy_path, resize, truncate
from kimi_jax.decoding.sampling import KEYS
from kimi_jax.decoding.state import DecodeState
from kimi_jax.drafter.context import CONTEXT, empty_context
from kimi_jax.drafter.dflash import DFlash, stack_taps
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.collectives import all_reduce
from kimi_jax.parameters import Parameters, bind


class Speculation(Protocol):
    """How a round drafts. Methods run inside the mesh on this device's requests; `bound` gives the object that does."""

    @property
    def drafter(self) -> DFlash | None:
        """Declarations of the drafter's weights."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose output the drafter reads."""
        ...

    @property
    def max_depth(self) -> int:
        """Longest path of a tree; a round gives at most one token more."""
        ...

    @property
    def context_spec(self) -> PartitionSpec | None:
        """How the arrays of a context lie on the mesh."""
        ...

    def bound(self, parameters: Parameters | None) -> "Speculation":
        """The same with the drafter's arrays in place of its declarations."""
        ...

    def empty_context(self, requests: int, capacity: int, dtype: DTypeLike) -> PyTree:
        """What the drafter keeps of each request's text of at most `capacity` tokens, before any, as global arrays."""
        ...

    def extend(
        self, context: PyTree, taps: list[Array], starts: Int[Array, " requests"], counts: Int[Array, " requests"]
    ) -> PyTree:
        """Adds the first `counts` rows of `taps`, which stand at positions from `starts` on."""
        ...

    def propose(self, model: CausalLM, state: DecodeState) -> DraftTree:
        """Trees of all requests, rooted at their anchors."""
        ...

    def verify[R](self, tree: DraftTree, run: Callable[[DraftTree], R]) -> R:
        """Runs the target on the trees, with as few rows as hold them."""
        ...

    def accept(self, tree: DraftTree, drawn: Int[Array, "requests rows"], state: DecodeState) -> Acceptance:
        """The accepted paths, given each row's next token."""
        ...


@dataclasses.dataclass(frozen=True)
class NoSpeculation:
    """Plain decoding: the tree is its root, so a round runs one row and gives one token."""

    drafter: None = None
    tap_layers: tuple[int, ...] = ()
    max_depth: int = 0
    context_spec: None = None

    def bound(self, parameters: Parameters | None) -> "NoSpeculation":
        """There is nothing to bind."""
        return self

    def empty_context(self, requests: int, capacity: int, dtype: DTypeLike) -> PyTree:
        """Nothing."""
        return None

    def extend(self, context: PyTree, taps: list[Array], starts: Array, counts: Array) -> PyTree:
        """Nothing."""
        return context

    def propose(self, model: CausalLM, state: DecodeState) -> DraftTree:
        """The anchors alone."""
        return root_only(state.anchors)

    def verify[R](self, tree: DraftTree, run: Callable[[DraftTree], R]) -> R:
        """One row for each request."""
        return run(tree)

    def accept(self, tree: DraftTree, drawn: Int[Array, "requests rows"], state: DecodeState) -> Acceptance:
        """The root, always."""
        return jax.vmap(walk)(tree, drawn)


def root_only(anchors: Int[Array, " requests"]) -> DraftTree:
    """Trees of one row each."""
    requests = anchors.shape[0]
    zeros = jnp.zeros((requests, 1), jnp.int32)
    return DraftTree(
        tokens=anchors[:, None],
        parents=zeros - 1,
        depths=zeros,
        cum_log_probs=jnp.zeros((requests, 1)),
        ancestors=jnp.ones((requests, 1, 1), bool),
        num_nodes=jnp.zeros(requests, jnp.int32),
        max_depth=0,
    )


@dataclasses.dataclass(frozen=True)
class DFlashSpeculation:
    """Drafting with DFlash: the argmax chain of its block, or the best tree of prefixes (DDTree)."""

    drafter: DFlash
    shape: Literal["chain", "tree"]
    budget: int
    """Nodes of a tree at most, the root not counted."""
    costs: CostTable | None = None
    """With costs each round verifies the number of nodes, up to the budget, that gives most tokens per unit of time."""
    keep_chain: bool = False
    """Always take the argmax chain into the tree, and spend what is left of the budget on other prefixes."""
    shared: bool = False
    """Let the requests of a device group share their budgets: the best prefixes of all are verified."""
    synthetic: float | None = None
    """Replaces the acceptance length by this mean. The text is then meaningless; throughput is not."""
    tp: int = 1

    WARM_UP = 16
    """Rounds a device group drafts before measured acceptance may turn drafting off."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """As the drafter's configuration names them."""
        return self.drafter.config.target_layer_ids

    @property
    def max_depth(self) -> int:
        """All of a block but its anchor, or what the budget allows."""
        return min(self.drafter.config.block_size - 1, self.budget)

    @property
    def context_spec(self) -> PartitionSpec:
        """Requests over dp and ep, key-value heads over tp."""
        return CONTEXT

    def bound(self, parameters: Parameters | None) -> "DFlashSpeculation":
        """Raises KeyError where there are no drafter parameters."""
        if parameters is None:
            raise KeyError("the parameters hold no 'drafter' beside the 'target'")
        return dataclasses.replace(self, drafter=bind(self.drafter, parameters))

    def empty_context(self, requests: int, capacity: int, dtype: DTypeLike) -> PyTree:
        """A ring of keys and values for each drafter layer: the draft window, or the whole text where that is less."""
        config = self.drafter.config
        config = dataclasses.replace(config, draft_window=min(config.draft_window, capacity))
        return empty_context(config, requests, dtype, self.tp)

    def extend(
        self, context: PyTree, taps: list[Array], starts: Int[Array, " requests"], counts: Int[Array, " requests"]
    ) -> PyTree:
        """Fuses the taps and writes their keys and values into the rings."""
        with jax.named_scope("drafter"):
            return self.drafter.extend_context(context, stack_taps(taps), starts, counts)

    def propose(self, model: CausalLM, state: DecodeState) -> DraftTree:
        """One forward of the drafter, then the tree; with costs, cut to what pays."""
        if self.costs is None:
            return self._limit(self._draft(model, state), state)
        pays = self._drafting_pays(state, self.costs)
        empty = resize(dataclasses.replace(root_only(state.anchors), max_depth=self.max_depth), self.budget + 1)
        return jax.lax.cond(pays, lambda: self._limit(self._draft(model, state), state), lambda: empty)

    def _draft(self, model: CausalLM, state: DecodeState) -> DraftTree:
        with jax.named_scope("drafter"):
            hidden = self.drafter.draft(state.context, state.anchors, state.lengths, model.model.embed_tokens)
            hidden = hidden[:, : self.max_depth]
            logits = self.drafter.logits(hidden, model.lm_head)
        with jax.named_scope("tree"):
            k = 1 if self.shape == "chain" else max(1, min(self.budget, model.config.vocab_size))
            log_probs, ids = self.drafter.candidates(hidden, logits, state.anchors, k)
            build = self._chain if self.shape == "chain" else self._tree
            return jax.vmap(build)(log_probs, ids, state.anchors)

    def _chain(self, log_probs: Float[Array, "depth parents k"], ids: Int[Array, "depth k"], root: Array) -> DraftTree:
        return chain(*greedy_path(log_probs, ids), root=root)

    def _tree(self, log_probs: Float[Array, "depth parents k"], ids: Int[Array, "depth k"], root: Array) -> DraftTree:
        return build_lattice(log_probs, ids, self.budget, root=root, keep_chain=self.keep_chain)

    def _limit(self, tree: DraftTree, state: DecodeState) -> DraftTree:
        """Cuts the trees to the nodes that pay, and to their shares of a common budget."""
        active = ~state.finished
        nodes = jnp.full(active.shape, tree.tokens.shape[-1] - 1)
        with jax.named_scope("tree"):
            if self.costs is not None:
                nodes = jnp.broadcast_to(choose_num_nodes(tree.cum_log_probs, active, self.costs), active.shape)
            if self.shared:
                total = all_reduce(jnp.where(active, nodes, 0).sum(), "ep")
                nodes = share_nodes(tree.cum_log_probs, active, total)
            elif self.costs is None:
                return tree
            return jax.vmap(truncate)(tree, nodes)

    def _drafting_pays(self, state: DecodeState, costs: CostTable) -> Bool[Array, ""]:
        """From what this batch accepted so far, the same on every device that shares a step."""
        lengths = jnp.arange(state.accepted.shape[1])
        totals = jnp.stack([state.rounds.sum(), (state.accepted * lengths).sum(), state.nodes.sum()])
        rounds, tokens, nodes = all_reduce(totals, "ep")
        measured = jnp.maximum(rounds, 1)
        return (rounds < self.WARM_UP) | drafting_pays(tokens / measured, nodes // measured, costs)

    def verify[R](self, tree: DraftTree, run: Callable[[DraftTree], R]) -> R:
        """With costs, one compiled verification for each of a few row counts, chosen by the largest tree."""
        rows = tree.tokens.shape[-1]
        counts = (*(count for count in ROW_COUNTS if count < rows), rows)
        if self.costs is None or len(counts) == 1:
            return run(tree)
        # Devices that share a step must take the same branch; truncation by costs made their trees equal in size,
        # a shared budget did not.
        largest = jax.lax.pmax(tree.num_nodes.max(), "ep")
        branches = [lambda tree, count=count: run(resize(tree, count)) for count in counts]
        return jax.lax.switch(row_count_index(largest, counts), branches, tree)

    def accept(self, tree: DraftTree, drawn: Int[Array, "requests rows"], state: DecodeState) -> Acceptance:
        """The walk along the target's tokens, or a path of the wanted length."""
        if self.synthetic is None:
            return jax.vmap(walk)(tree, drawn)
        return jax.vmap(self._synthetic_path)(tree, drawn, state.keys, state.lengths)

    def _synthetic_path(self, tree: DraftTree, drawn: Array, key: Array, length: Array) -> Acceptance:
        """Accepts the deepest path's first rows, as many as average `synthetic` (no more than the tree has)."""
        wanted = self.synthetic or 1.0
        whole = int(wanted)
        extra = (
            jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl=KEYS), length)) < wanted - whole
        )
        deepest = jnp.argmax(tree.depths)
        accepted = jnp.minimum(whole + extra, tree.depths[deepest] + 1)
        step = jnp.arange(tree.max_depth + 1)
        path = jnp.argmax(tree.ancestors[deepest] & (tree.depths == step[:, None]), axis=-1)
        path = jnp.where(step < accepted, path, 0)
        tokens = jnp.where(step < accepted, drawn[path], -1)
        return Acceptance(path=path, length=accepted, tokens=tokens, bonus=drawn[path[accepted - 1]])
