"""Online EPLB: experts move between rounds to where the loads just measured are even, without a restart.

The device counts rows by expert while it decodes. Every few rounds the host reads the counts, makes a placement for
each layer (`parallel.eplb`) and the weights move among the devices; compiled programs take the placement as an argument
and stay as they are.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from kimi_jax.decoding.state import DecodeState
from kimi_jax.model.transformer import CausalLM
from kimi_jax.parallel import host_arrays
from kimi_jax.parallel.collectives import all_to_all, axis_index, axis_size
from kimi_jax.parallel.eplb import balanced_placements, imbalance
from kimi_jax.parallel.placement import EMPTY, Placement, PlacementTable
from kimi_jax.parallel.sharding import REQUESTS, over_mesh, rules
from kimi_jax.parameters import Parameters, specs
from meshes.presets import Layout


@dataclasses.dataclass(frozen=True)
class Move:
    """What one move did. Balance is the load of the fullest rank over the mean, averaged over the layers that moved."""

    round: int
    """Rounds that had been run, since the batch began."""
    before: float
    """Balance of the loads counted since the last look, as experts lay then."""
    after: float
    """The same loads as experts lie now."""
    slots: int
    """That hold another expert than before, over all layers."""
    seconds: float


class Rebalancer:
    """Where experts lie on a mesh, and their moves. All processes run it alike.

    Args:
      every: rounds between moves.
    """

    def __init__(self, model: CausalLM, mesh: Mesh, layout: Layout, every: int):
        if every < 1:
            raise ValueError(f"experts move every {every} rounds; it must be 1 or more")
        if layout.expert_ranks == 1:
            raise ValueError("one rank holds all experts: there is nothing to balance")
        self.every, self._mesh, self._layout = every, mesh, layout
        experts = model.config.n_routed_experts
        self.placements = {layer: Placement(slots, experts) for layer, slots in model.slot_experts.items()}
        self.looks = 0
        """How often loads were looked at; where no other place is better, experts stay."""
        self.moves: list[Move] = []
        self._weights = specs(model, rules(layout))["model"]["layers"]
        self._last = 0

    def tables(self) -> dict[int, PlacementTable]:
        """The placement as programs take it."""
        return {layer: self._table(placement) for layer, placement in self.placements.items()}

    def summary(self) -> str:
        """One line on the moves so far."""
        if not self.looks:
            return f"experts have not moved: fewer than {self.every} rounds were run"
        count, looks = len(self.moves), f"{self.looks} look{'s' if self.looks > 1 else ''}"
        if not self.moves:
            return f"experts have not moved: {looks} at the loads found no better places"
        slots, seconds = sum(move.slots for move in self.moves), sum(move.seconds for move in self.moves)
        before, after = (float(np.mean([getattr(move, when) for move in self.moves])) for when in ("before", "after"))
        return (
            f"experts moved {count} time{'s' if count > 1 else ''} ({slots} slots in {seconds:.1f} s) in {looks} at "
            f"the loads: by the loads counted before a move, the fullest rank had {before:.2f} × the mean as experts "
            f"lay and {after:.2f} × as they lie after it, on average"
        )

    def begin(self) -> None:
        """Tells that rounds are counted from 0 again."""
        self._last = 0

    def rounds_left(self, rounds: int) -> int:
        """Until the next look, when `rounds` have been run; at least 1."""
        return max(1, self._last + self.every - rounds)

    def is_due(self, rounds: int) -> bool:
        """Whether it is time to look at the loads, when `rounds` have been run."""
        return rounds >= self._last + self.every

    def after(self, rounds: int, parameters: Parameters, state: DecodeState) -> DecodeState:
        """Moves experts by what was counted; `target` and `placement` of the parameters change in place."""
        self._last = rounds
        counted = state.counters.loads
        assert counted is not None
        loads = np.asarray(self._total(counted))
        if loads.any():
            self.consider(rounds, parameters, loads)
        return dataclasses.replace(state, counters=dataclasses.replace(state.counters, loads=self._zeros(counted)))

    def consider(self, rounds: int, parameters: Parameters, loads: Int[np.ndarray, "layers experts"]) -> None:
        """Moves the experts of those layers whose fullest rank would have less of these loads than it has."""
        started, ranks = time.perf_counter(), self._layout.expert_ranks
        self.looks += 1
        slots = next(iter(self.placements.values())).num_slots
        before, after, moved = [], [], 0
        for layer, new, counted in zip(
            list(self.placements), balanced_placements(loads, ranks, slots), loads, strict=True
        ):
            if not counted.any():
                continue
            now, then = (imbalance(placement, counted, ranks) for placement in (self.placements[layer], new))
            if then >= now * (1 - 1e-9):  # equal up to rounding
                continue
            sources = source_slots(self.placements[layer], new)
            moved += int((sources != np.arange(slots)).sum())
            layers = parameters["target"]["model"]["layers"]
            layers[layer]["mlp"]["experts"] = self._move(layers[layer]["mlp"]["experts"], self._replicated(sources))
            parameters["placement"][layer] = self._table(new)
            self.placements[layer] = new
            before.append(now)
            after.append(then)
        if before:
            jax.block_until_ready(parameters["target"])
            seconds = time.perf_counter() - started
            self.moves.append(Move(rounds, float(np.mean(before)), float(np.mean(after)), moved, seconds))

    def _replicated(self, values: Int[np.ndarray, " _"]) -> Int[Array, " _"]:
        return host_arrays.place(values, self._mesh, PartitionSpec())

    def _table(self, placement: Placement) -> PlacementTable:
        return jax.tree.map(self._replicated, placement.table())

    @functools.cached_property
    def _total(self):
        return jax.jit(lambda loads: loads.sum(0), out_shardings=NamedSharding(self._mesh, PartitionSpec()))

    @functools.cached_property
    def _zeros(self):
        return jax.jit(jnp.zeros_like, out_shardings=NamedSharding(self._mesh, REQUESTS))

    @functools.cached_property
    def _move(self):
        """`move(experts, sources)`: a layer's stacks with slot i holding what slot `sources[i]` held."""
        layer = next(iter(self.placements))
        places = self._weights[layer]["mlp"]["experts"]

        def move(experts: Parameters, sources: Int[Array, " slots"]) -> Parameters:
            return jax.tree.map(lambda stack: fetch_slots(stack, sources, self._layout.expert_axes), experts)

        return over_mesh(move, self._mesh, (places, PartitionSpec()), places)


def source_slots(old: Placement, new: Placement) -> Int[np.ndarray, " slots"]:
    """For each slot one that holds its new expert now: itself where it does already or will be empty."""
    holders: Mapping[int, int] = {expert: slot for slot, expert in reversed([*enumerate(old.slot_experts)])}
    pairs = enumerate(zip(old.slot_experts, new.slot_experts, strict=True))
    return np.array([slot if expert in (held, EMPTY) else holders[expert] for slot, (held, expert) in pairs], np.int32)


def fetch_slots(
    stack: Shaped[Array, "local ..."], sources: Int[Array, " slots"], expert_axes: tuple[str, ...]
) -> Shaped[Array, "local ..."]:
    """This rank's new slots from wherever they are: slot j of all ranks in one all-to-all, one j after the other.

    So the devices hold no more than one matrix for every rank beside the old and the new stack of one layer.
    """
    local, ranks = stack.shape[0], axis_size(expert_axes)
    wanted = sources.reshape(ranks, local)

    def fetch(place: Int[Array, ""]) -> Array:
        each = wanted[:, place]  # ranks that do not hold a slot send another one, which nobody takes
        received = all_to_all(stack[each % local], expert_axes, split=0, join=0)
        return received[each[axis_index(expert_axes)] // local]

    return jax.lax.map(fetch, jnp.arange(local))
