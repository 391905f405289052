"""What a round proposes: nothing but the anchor, a chain, or a draft tree."""

import dataclasses
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from kimi_jax.ddtree.acceptance import Acceptance, walk
from kimi_jax.ddtree.budget import share_nodes
from kimi_jax.ddtree.tree import DraftTree, build_lattice, chain, greedy_path, truncate
from kimi_jax.decoding.sampling import KEYS, only_known
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
    keep_chain: bool = False
    """Always take the argmax chain into the tree, and spend what is left of the budget on other prefixes."""
    shared: bool = False
    """Let the requests of a device group share their budgets: the best prefixes of all are verified."""
    synthetic: float | None = None
    """Replaces the acceptance length by this mean. The text is then meaningless; throughput is not."""
    tp: int = 1
    known_ids: int | None = None
    """No id from here on is drafted; see `Programs`."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """As the drafter's configuration names them."""
        return self.drafter.config.target_layer_ids

    @property
    def max_depth(self) -> int:
        """All of a block but its anchor, whatever the budget: one state serves programs of several budgets."""
        return self.drafter.config.block_size - 1

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
        """One forward of the drafter, then the tree. Without a budget nothing is drafted, but the context is kept."""
        if self.budget == 0:
            return root_only(state.anchors)
        tree = self._draft(model, state)
        return self._share(tree, state) if self.shared else tree

    def _draft(self, model: CausalLM, state: DecodeState) -> DraftTree:
        with jax.named_scope("drafter"):
            hidden = self.drafter.draft(state.context, state.anchors, state.lengths, model.model.embed_tokens)
            hidden = hidden[:, : min(self.max_depth, self.budget)]
            logits = only_known(self.drafter.logits(hidden, model.lm_head), self.known_ids)
        with jax.named_scope("tree"):
            k = 1 if self.shape == "chain" else max(1, min(self.budget, model.config.vocab_size))
            log_probs, ids = self.drafter.candidates(hidden, logits, state.anchors, k)
            build = self._chain if self.shape == "chain" else self._tree
            return jax.vmap(build)(log_probs, ids, state.anchors)

    def _chain(self, log_probs: Float[Array, "depth parents k"], ids: Int[Array, "depth k"], root: Array) -> DraftTree:
        return chain(*greedy_path(log_probs, ids), root=root)

    def _tree(self, log_probs: Float[Array, "depth parents k"], ids: Int[Array, "depth k"], root: Array) -> DraftTree:
        return build_lattice(log_probs, ids, self.budget, root=root, keep_chain=self.keep_chain)

    def _share(self, tree: DraftTree, state: DecodeState) -> DraftTree:
        """Cuts the trees to their shares of the running requests' common budget."""
        active = ~state.finished
        with jax.named_scope("tree"):
            total = self.budget * all_reduce(active.sum(), "ep")
            return jax.vmap(truncate)(tree, share_nodes(tree.cum_log_probs, active, total))

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
