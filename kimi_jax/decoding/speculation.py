"""What a round proposes and accepts: nothing but the anchor, or what a drafter proposes: a chain, or a draft tree."""

import dataclasses
import math
from typing import Any, Literal, Protocol, Self, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Int, PyTree

from kimi_jax.ddtree.acceptance import Acceptance, walk
from kimi_jax.ddtree.tree import DraftTree
from kimi_jax.decoding.sampling import KEYS
from kimi_jax.decoding.state import DecodeState, Hits
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parameters import Parameters, bind


@dataclasses.dataclass(frozen=True)
class Draft:
    """How to speculate."""

    kind: str = "ddtree"
    """A drafter of the table `engine.DRAFTERS`, or none."""
    budget: int | Literal["auto"] = "auto"
    """Tree nodes a request, the root not counted; auto weighs expected tokens against cost before every dispatch."""
    keep_chain: bool = False
    """Always verify the argmax chain; the rest of the budget goes to the best other prefixes."""
    shared: bool = False
    """One budget for a device group's requests together."""
    synthetic: float | None = None
    """Mean acceptance length to pretend."""

    def __post_init__(self) -> None:
        if self.budget != "auto" and self.budget < 0:
            raise ValueError(f"budget is {self.budget}; a tree has 0 nodes or more")
        if self.synthetic is not None and not 1 <= self.synthetic < math.inf:
            raise ValueError(f"synthetic acceptance is {self.synthetic}; every round gives at least 1 token")


PLAIN = Draft(kind="none")


class DraftContext(Protocol):
    """What a drafter keeps of each text, beside the state that all rounds have."""

    @property
    def module(self) -> nnx.Module | None:
        """Declarations of the drafter's weights, which are `parameters["drafter"]`; None where it has none."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose output the drafter reads."""
        ...

    @property
    def spec(self) -> PartitionSpec:
        """How the arrays of a context lie on the mesh."""
        ...

    def empty(self, slots: int, capacity: int, dtype: DTypeLike) -> PyTree:
        """The arrays of so many slots for texts of at most `capacity` tokens, before any; global, the slots first."""
        ...

    def rows(self, taps: list[Array], starts: Int[Array, " requests"], /) -> PyTree:
        """What is kept of rows that stand at positions from `starts` on."""
        ...

    def write(
        self,
        context: PyTree,
        rows: PyTree,
        starts: Int[Array, " requests"],
        counts: Int[Array, " requests"],
        slots: Int[Array, " requests"] | None = None,
        /,
    ) -> PyTree:
        """Adds the first `counts` of the rows at positions from `starts` on to the texts of `slots`.

        None stands for all slots in order. A slot past the last has no rows, and nothing of it is kept. The next text
        of a slot begins anew, and must not be reached by what the one before has left: values are finite.
        """
        ...


@runtime_checkable
class PagedContext(DraftContext, Protocol):
    """A context that a text can begin with which another has filled: its rows are also kept by pages.

    Without it a prompt that begins like another's is run from its first token.
    """

    def empty_pages(self, pages: int, page_tokens: int, dtype: DTypeLike, /) -> PyTree:
        """The arrays of a pool of pages; global, the pages first, and laid out by `spec` like the context."""
        ...

    def keep(
        self,
        pool: PyTree,
        rows: PyTree,
        pages: Int[Array, "requests tiles"],
        starts: Int[Array, " requests"],
        counts: Int[Array, " requests"],
        /,
    ) -> PyTree:
        """Writes the same rows as `write` into the pages of their positions; values are finite."""
        ...

    def restore(
        self,
        context: PyTree,
        pool: PyTree,
        pages: Int[Array, "requests tiles"],
        lengths: Int[Array, " requests"],
        slots: Int[Array, " requests"],
        /,
    ) -> PyTree:
        """The context as if the first `lengths` positions of the texts of `slots` had been written to it.

        They stand in their pages. A slot past the last is nobody's.
        """
        ...


class Drafter(Protocol):
    """What proposes trees. Where its context has weights, both are dataclasses whose fields are `context`, `module`.

    Methods run inside the mesh on this device's requests.
    """

    @property
    def max_depth(self) -> int:
        """Longest path of its trees, at least 1; a round gives at most one token more."""
        ...

    @property
    def context(self) -> DraftContext | None:
        """None for a drafter that needs no more of a text than the state has."""
        ...

    def propose(self, model: CausalLM, state: DecodeState) -> DraftTree:
        """Trees of all slots, rooted at their anchors; what it says of those that do not run is not looked at."""
        ...


@dataclasses.dataclass(frozen=True)
class Speculation:
    """A round's proposals and their acceptance. Without a drafter a round runs one row and gives one token.

    Raises:
      ValueError: a drafter whose `max_depth` is missing, or less than 1.
    """

    drafter: Drafter | None = None
    synthetic: float | None = None
    """Replaces the acceptance length by this mean. The text is then meaningless; throughput is not."""

    def __post_init__(self) -> None:
        if self.drafter is None:
            return
        depth = getattr(self.drafter, "max_depth", None)
        if not isinstance(depth, int) or depth < 1:
            name = type(self.drafter).__name__
            raise ValueError(f"drafter {name} has max_depth {depth}; give it the longest path of its trees, at least 1")

    @property
    def max_depth(self) -> int:
        """Longest path of a tree; a round gives at most one token more."""
        return 0 if self.drafter is None else self.drafter.max_depth

    @property
    def context(self) -> DraftContext | None:
        """The drafter's context."""
        return None if self.drafter is None else self.drafter.context

    @property
    def module(self) -> nnx.Module | None:
        """Declarations of the drafter's weights."""
        return None if self.context is None else self.context.module

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose output the drafter reads."""
        return () if self.context is None else self.context.tap_layers

    def _with_drafter(self, **changes: Any) -> Self:
        return dataclasses.replace(self, drafter=dataclasses.replace(cast(Any, self.drafter), **changes))

    def with_budget(self, nodes: int) -> Self:
        """The same with trees of so many nodes, for a drafter that has a budget."""
        return self._with_drafter(budget=nodes)

    def bound(self, parameters: Parameters | None) -> Self:
        """The same with the drafter's arrays in place of its declarations.

        Raises:
          KeyError: there are weights declared, and no parameters.
        """
        if self.module is None:
            return self
        if parameters is None:
            raise KeyError("the parameters hold no 'drafter' beside the 'target'")
        module = bind(self.module, parameters)
        return self._with_drafter(context=dataclasses.replace(cast(Any, self.context), module=module))

    def empty_context(self, slots: int, capacity: int, dtype: DTypeLike) -> PyTree:
        """What the drafter keeps of each slot's text of at most `capacity` tokens, before any, as global arrays."""
        return None if self.context is None else self.context.empty(slots, capacity, dtype)

    def empty_pages(self, pages: int, page_tokens: int, dtype: DTypeLike) -> PyTree:
        """What a pool of pages keeps for the drafter's context, as global arrays; None where nothing is to be kept."""
        return self.context.empty_pages(pages, page_tokens, dtype) if isinstance(self.context, PagedContext) else None

    @property
    def goes_on(self) -> bool:
        """Whether it can go on with a text that begins in pages which another has filled."""
        return self.context is None or isinstance(self.context, PagedContext)

    def extend(
        self,
        state: DecodeState,
        taps: list[Array],
        starts: Int[Array, " requests"],
        counts: Int[Array, " requests"],
        slots: Int[Array, " requests"] | None = None,
    ) -> DecodeState:
        """The state with the first `counts` rows of `taps` in the drafter's context of `slots`, or of all in order.

        The rows stand at positions from `starts` on.
        """
        if self.context is None:
            return state
        kept = state.context_pages
        with jax.named_scope("drafter"):
            rows = self.context.rows(taps, starts)
            if kept is not None and isinstance(self.context, PagedContext):
                pages = state.pages if slots is None else state.pages.at[slots].get(mode="clip")
                kept = self.context.keep(kept, rows, pages, starts, counts)
            context = self.context.write(state.context, rows, starts, counts, slots)
        return dataclasses.replace(state, context=context, context_pages=kept)

    def restore(self, state: DecodeState, hits: Hits) -> DecodeState:
        """The state with the drafter's context of slots whose texts begin in pages that others have filled."""
        assert isinstance(self.context, PagedContext)
        context = self.context.restore(state.context, state.context_pages, hits.pages, hits.lengths, hits.slots)
        return dataclasses.replace(state, context=context)

    def propose(self, model: CausalLM, state: DecodeState) -> DraftTree:
        """Trees of all requests, rooted at their anchors; without a drafter the anchors alone.

        Raises:
          ValueError: a tree that is deeper than the drafter says: the state has no room for its statistics.
        """
        if self.drafter is None:
            return root_only(state.anchors)
        tree = self.drafter.propose(model, state)
        if tree.max_depth > self.max_depth:
            name = type(self.drafter).__name__
            raise ValueError(
                f"drafter {name} proposed a tree of depth {tree.max_depth}, and its max_depth is {self.max_depth}; "
                "give it the longest path of its trees"
            )
        return tree

    def accept(self, tree: DraftTree, drawn: Int[Array, "requests rows"], state: DecodeState) -> Acceptance:
        """The walk along each row's next token as the target has drawn it, or a path of the wanted length."""
        if self.synthetic is None:
            return jax.vmap(walk)(tree, drawn)
        return jax.vmap(self._synthetic_path)(tree, drawn, state.asked.keys, state.lengths)

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
