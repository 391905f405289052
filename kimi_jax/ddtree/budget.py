"""How many drafted nodes are worth verifying, given what a step costs.

A tree's nodes stand by falling probability, and the drafter expects 1 + Σ exp(cum_log_probs) tokens from a round that
verifies the first n. More rows also cost more: on a mixture of experts each new row wakes experts whose weights must be
read. The best n has the most expected tokens per unit of time (CaDDTree, arXiv 2606.01813; the expert term as in EVICT,
arXiv 2605.00342). At an equal number of rows the best tree is never worse than the chain by the drafter's own numbers:
where rows are dear the choice becomes a chain's few nodes, then the root alone. Whether to draft at all must be known
before drafting, so it is decided from measured acceptance (`drafting_pays`, `fastest_mode`).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.parallel.collectives import Axis, all_gather, all_reduce, axis_index

ROW_COUNTS = (1, 8, 16, 24, 32, 64)
"""Rows a request, the root included, that a verification is compiled for: with 8 heads a device (tp 8) all but the
first fill whole 64-row tiles."""

Mode = Literal["plain", "chain", "tree"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CostTable:
    """Time of a round's parts in µs, for a fixed number of requests. A pytree: new numbers compile nothing."""

    draft_us: Float[Array, ""]
    """Everything a round does beside verification: draft, tree, walk, commit."""
    plain_us: Float[Array, ""]
    """A step of plain decoding."""
    verify_us: Float[Array, " nodes"]
    """[n]: verification of n nodes and the root, for each request; never falls with n."""

    @classmethod
    def roofline(
        cls,
        *,
        draft_us: float,
        fixed_us: float,
        row_us: float,
        expert_bytes: float,
        bandwidth_gb_s: float,
        num_experts: int,
        experts_per_token: int,
        requests: int = 1,
        row_counts: Sequence[int] = ROW_COUNTS,
    ) -> "CostTable":
        """From plain numbers: verify(n) = fixed + compiled rows · row + distinct experts · bytes / bandwidth.

        Args:
          draft_us: the drafter and the rest of a round.
          fixed_us: what a step costs whatever its rows: attention and dense weights, launches, collectives.
          row_us: of each compiled row, padding included.
          expert_bytes: what a device reads, over all layers, for each distinct expert of a step: the bytes of one
            expert in all layers divided by the devices that share the experts (times any imbalance).
          bandwidth_gb_s: of the device's memory, in 1e9 bytes a second, as achieved.
          num_experts, experts_per_token: routed experts of a layer, and how many a token takes.
          requests: that share the experts in a step.
          row_counts: compiled rows a request, rising.

        Raises:
          ValueError: a cost is negative, or the bandwidth or a count is not positive.
        """
        if min(draft_us, fixed_us, row_us, expert_bytes) < 0 or bandwidth_gb_s <= 0 or requests < 1:
            raise ValueError("costs must not be negative; bandwidth and requests must be positive")
        counts = _rising(row_counts)
        rows = np.arange(1, counts[-1] + 1)
        compiled = np.array(counts)[np.searchsorted(counts, rows)]
        distinct = expected_distinct_experts(requests * rows, num_experts, experts_per_token)
        read_us = distinct * expert_bytes / (bandwidth_gb_s * 1e3)
        verify = fixed_us + requests * compiled * row_us + read_us
        return cls(jnp.asarray(draft_us, jnp.float32), jnp.asarray(verify[0], jnp.float32), jnp.asarray(verify))

    @classmethod
    def measured(cls, *, draft_us: float, verify_us: Mapping[int, float], plain_us: float | None = None) -> "CostTable":
        """From times by rows (the root included), straight lines between them.

        Args:
          draft_us: the drafter and the rest of a round.
          verify_us: time of a verification by rows a request; 1 row must be among them.
          plain_us: a step of plain decoding; by default a verification of 1 row.

        Raises:
          ValueError: 1 row is not among the measurements, or a time is not positive.
        """
        counts = sorted(verify_us)
        if not counts or counts[0] != 1:
            raise ValueError(f"times were measured for {counts} rows; 1 row must be among them")
        if min(verify_us.values()) <= 0 or draft_us < 0:
            raise ValueError("times must be positive")
        times = np.maximum.accumulate([verify_us[count] for count in counts])  # noise must not make rows free
        verify = np.interp(np.arange(1, counts[-1] + 1), counts, times)
        plain = verify[0] if plain_us is None else plain_us
        return cls(jnp.asarray(draft_us, jnp.float32), jnp.asarray(plain, jnp.float32), jnp.asarray(verify))

    def round_us(self, num_nodes: Int[Array, "..."] | int) -> Float[Array, "..."]:
        """Time of a round that verifies this many nodes a request."""
        return self.draft_us + self.verify_us[num_nodes]


def expected_distinct_experts(rows: np.ndarray | int, num_experts: int, experts_per_token: int) -> np.ndarray:
    """Distinct experts that `rows` tokens take under uniform routing: E (1 - (1 - k/E)^rows).

    An upper estimate for a tree, whose rows share prefixes and so experts.
    """
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** np.asarray(rows, np.float64))


def choose_num_nodes(
    cum_log_probs: Float[Array, "requests rows"],
    active: Bool[Array, " requests"],
    table: CostTable,
    axis: Axis = "ep",
) -> Int[Array, ""]:
    """Nodes a request that give the batch the most expected tokens per µs; the fewest among equals.

    Args:
      cum_log_probs: of the trees (`DraftTree.cum_log_probs`): 0 for the root, falling, -inf in padding.
      active: requests that still write; the others neither gain nor choose.
      table: costs for this batch; nodes past the shorter of table and trees are not considered.
      axis: mesh axes that must agree because they run one step together.
    """
    rows = min(cum_log_probs.shape[1], table.verify_us.shape[0])
    probabilities = jnp.where(active[:, None], jnp.exp(cum_log_probs[:, :rows]), 0)
    tokens = jnp.cumsum(all_reduce(probabilities.sum(axis=0), axis))
    return jnp.argmax(tokens / table.round_us(jnp.arange(rows))).astype(jnp.int32)


def share_nodes(
    cum_log_probs: Float[Array, "requests rows"],
    active: Bool[Array, " requests"],
    total: Int[Array, ""] | int,
    axis: Axis = "ep",
) -> Int[Array, " requests"]:
    """Nodes of each request when the best `total` of the whole batch are verified, whosever they are.

    A request's share is at most its tree. `axis` names the mesh axes whose requests share the budget.
    """
    nodes = jnp.where(active[:, None], cum_log_probs[:, 1:], -jnp.inf)
    everyone = all_gather(nodes, axis)
    order = jnp.argsort(-everyone.reshape(-1), stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    taken = (place.reshape(everyone.shape) < total) & (everyone > -jnp.inf)
    own = jax.lax.dynamic_slice_in_dim(taken, axis_index(axis) * nodes.shape[0], nodes.shape[0])
    return jnp.sum(own, axis=1, dtype=jnp.int32)


def row_count_index(num_nodes: Int[Array, "*batch"], row_counts: Sequence[int] = ROW_COUNTS) -> Int[Array, ""]:
    """Position in `row_counts` of the smallest that holds the nodes and the root, for the largest of a batch.

    For `lax.switch` over one compiled verification each; the last where none is large enough.
    """
    counts = jnp.asarray(_rising(row_counts))
    index = jnp.searchsorted(counts, jnp.max(num_nodes) + 1)
    return jnp.minimum(index, len(row_counts) - 1).astype(jnp.int32)


def drafting_pays(
    tokens_per_round: Float[Array, ""] | float, num_nodes: Int[Array, ""] | int, table: CostTable
) -> Bool[Array, ""]:
    """Whether rounds that gave this many tokens (measured, bonus included) beat plain decoding."""
    return tokens_per_round / table.round_us(num_nodes) > 1 / table.plain_us


def fastest_mode(
    table: CostTable, *, chain_tokens: float, chain_nodes: int, tree_tokens: float, tree_nodes: int
) -> Mode:
    """What decodes fastest at measured tokens a round; the simpler mode where two are equal. Runs on the host."""
    rates: dict[Mode, float] = {
        "plain": 1 / float(table.plain_us),
        "chain": chain_tokens / float(table.round_us(chain_nodes)),
        "tree": tree_tokens / float(table.round_us(tree_nodes)),
    }
    return max(rates, key=lambda mode: rates[mode])


def _rising(row_counts: Sequence[int]) -> tuple[int, ...]:
    if not row_counts or row_counts[0] < 1 or any(a >= b for a, b in itertools.pairwise(row_counts)):
        raise ValueError(f"row counts {tuple(row_counts)} must be positive and rising")
    return tuple(row_counts)
