"""DFlash as a drafter of rounds: the argmax chain of its block, or the best tree of prefixes (DDTree)."""

import dataclasses
from typing import Literal

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.ddtree.budget import share_nodes
from kimi_jax.ddtree.tree import DraftTree, build_lattice, chain, greedy_path, truncate
from kimi_jax.decoding.sampling import only_known
from kimi_jax.decoding.speculation import root_only
from kimi_jax.decoding.state import DecodeState
from kimi_jax.drafter import context
from kimi_jax.drafter.context import CONTEXT, Context, empty_context
from kimi_jax.drafter.dflash import DFlash, stack_taps
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel.collectives import all_reduce


@dataclasses.dataclass(frozen=True)
class DFlashContext:
    """Keys and values of each text's last positions, a ring for each drafter layer."""

    module: DFlash
    tp: int = 1

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """As the drafter's configuration names them."""
        return self.module.config.target_layer_ids

    @property
    def spec(self) -> PartitionSpec:
        """Requests over dp and ep, key-value heads over tp."""
        return CONTEXT

    def empty(self, slots: int, capacity: int, dtype: DTypeLike) -> Context:
        """Rings of the draft window, or of the whole text where that is less."""
        config = self.module.config
        config = dataclasses.replace(config, draft_window=min(config.draft_window, capacity))
        return empty_context(config, slots, dtype, self.tp)

    def empty_pages(self, pages: int, page_tokens: int, dtype: DTypeLike) -> Context:
        """Keys and values of all positions of so many pages."""
        return empty_context(self.module.config, pages, dtype, self.tp, rows=page_tokens)

    def rows(self, taps: list[Array], starts: Int[Array, " requests"]) -> Context:
        """Fuses the taps and computes their keys and values."""
        return self.module.context_rows(stack_taps(taps), starts)

    write = staticmethod(context.write)
    keep = staticmethod(context.keep)
    restore = staticmethod(context.restore)


@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
    """One forward of DFlash a round, and a chain or a tree of what it says."""

    context: DFlashContext
    shape: Literal["chain", "tree"]
    budget: int
    """Nodes of a tree at most, the root not counted."""
    keep_chain: bool = False
    """Always take the argmax chain into the tree, and spend what is left of the budget on other prefixes."""
    shared: bool = False
    """Let the requests of a device group share their budgets: the best prefixes of all are verified."""
    known_ids: int | None = None
    """No id from here on is drafted; see `Programs`."""

    @property
    def max_depth(self) -> int:
        """All of a block but its anchor, whatever the budget: one state serves programs of several budgets."""
        return self.context.module.config.block_size - 1

    def propose(self, model: CausalLM, state: DecodeState) -> DraftTree:
        """One forward of the drafter, then the tree. Without a budget nothing is drafted, but the context is kept."""
        if self.budget == 0:
            return root_only(state.anchors)
        tree = self._draft(model, state)
        return self._share(tree, state) if self.shared else tree

    def _draft(self, model: CausalLM, state: DecodeState) -> DraftTree:
        module = self.context.module
        with jax.named_scope("drafter"):
            hidden = module.draft(state.context, state.anchors, state.lengths, model.model.embed_tokens)
            hidden = hidden[:, : min(self.max_depth, self.budget)]
            logits = only_known(module.logits(hidden, model.lm_head), self.known_ids)
        with jax.named_scope("tree"):
            k = 1 if self.shape == "chain" else max(1, min(self.budget, model.config.vocab_size))
            log_probs, ids = module.candidates(hidden, logits, state.anchors, k)
            build = self._chain if self.shape == "chain" else self._tree
            return jax.vmap(build)(log_probs, ids, state.anchors)

    def _chain(self, log_probs: Float[Array, "depth parents k"], ids: Int[Array, "depth k"], root: Array) -> DraftTree:
        return chain(*greedy_path(log_probs, ids), root=root)

    def _tree(self, log_probs: Float[Array, "depth parents k"], ids: Int[Array, "depth k"], root: Array) -> DraftTree:
        return build_lattice(log_probs, ids, self.budget, root=root, keep_chain=self.keep_chain)

    def _share(self, tree: DraftTree, state: DecodeState) -> DraftTree:
        """Cuts the trees to their shares of the running requests' common budget."""
        active = state.running
        with jax.named_scope("tree"):
            total = self.budget * all_reduce(active.sum(), "ep")
            return jax.vmap(truncate)(tree, share_nodes(tree.cum_log_probs, active, total))
