"""Which experts get replicas and where every replica lies, from measured loads: DeepSeek's EPLB (own code, in numpy).

The published policies (DeepSeek-V3, arXiv 2412.19437, section 3.4; deepseek-ai/EPLB): spare slots go to the experts
with the highest load per replica, one after the other, and replicas are packed onto ranks heaviest first. The global
policy does so over all ranks. The hierarchical one first packs groups of experts onto nodes and keeps to them, which
saves network traffic for models whose router keeps to groups; K2.6 has a single group, so it always gets the global.

Beyond what is published, no rank holds an expert twice: the second replica would take a slot and spread nothing. So an
expert has at most one replica a rank, and where the packing would put two together, two ranks exchange slots.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, Real

from kimi_jax.parallel.placement import Placement
from kimi_jax.text_files import TextError, read_json, write_text
from meshes.presets import expert_slots

FORMAT = "expert placements 1"


def pack_evenly(
    weights: Real[np.ndarray, " items"], packs: int, kinds: Int[np.ndarray, " items"] | None = None
) -> Int[np.ndarray, "packs items_per_pack"]:
    """Items by pack, as many in each, their sums as even as a greedy choice makes them.

    Heaviest first (the lower index where equal), each to the lightest pack with room; in the order they came. A pack
    holds no two items of one of `kinds`, as long as no kind has more items than there are packs.
    """
    size = len(weights) // packs
    if size * packs != len(weights):
        raise ValueError(f"{len(weights)} items do not fill {packs} packs evenly")
    if size == 1:
        return np.arange(packs)[:, None]
    kind = np.arange(len(weights)) if kinds is None else kinds
    held: list[list[int]] = [[] for _ in range(packs)]
    sums = np.zeros(packs)

    def without(pack: int, item: int) -> bool:
        return all(kind[other] != kind[item] for other in held[pack])

    for item in np.argsort(-weights, kind="stable").tolist():
        room = sorted((pack for pack in range(packs) if len(held[pack]) < size), key=sums.__getitem__)
        to = next((pack for pack in room if without(pack, item)), None)
        if to is None:  # every pack with room has one: a full pack takes it and gives up the item nearest in weight
            to = room[0]
            swaps = [
                (weights[other] - weights[item], sums[pack], pack, place)
                for pack in range(packs) if without(pack, item)
                for place, other in enumerate(held[pack]) if without(to, other)
            ]  # fmt: skip
            if swaps:
                _, _, pack, place = min(swaps)
                moved, held[pack][place] = held[pack][place], item
                sums[pack] += weights[item] - weights[moved]
                item = moved
        held[to].append(item)
        sums[to] += weights[item]
    return np.array(held)


def replicate(
    loads: Real[np.ndarray, " experts"], num_replicas: int, most: int | None = None
) -> Int[np.ndarray, " replicas"]:
    """The expert of each replica: every expert once, then again and again the one with the highest load a replica.

    None gets more than `most` replicas before all have as many.
    """
    counts = np.ones(len(loads))
    experts = list(range(len(loads)))
    for _ in range(num_replicas - len(loads)):
        free = counts < (most or np.inf)
        heaviest = int(np.argmax(np.where(free if free.any() else True, loads / counts, -1)))
        experts.append(heaviest)
        counts[heaviest] += 1
    return np.array(experts)


def rebalance(
    loads: Real[np.ndarray, " experts"], num_slots: int, ranks: int, groups: int = 1, nodes: int = 1
) -> Int[np.ndarray, " slots"]:
    """The expert in each slot of one layer; slots of a rank are contiguous, ranks of a node too.

    Hierarchical where `nodes` divides `groups`, global otherwise. No rank holds an expert twice, unless there are more
    slots than experts times ranks (of a node).

    Args:
      loads: rows that chose each expert, over any time.
      num_slots: over all ranks; those beyond one an expert hold replicas.
      groups: of consecutive experts, that the router chooses among.
      nodes: over which the ranks are spread evenly.

    Raises:
      ValueError: sizes that do not divide, or fewer slots than experts.
    """
    experts = len(loads)
    if num_slots < experts:
        raise ValueError(f"{num_slots} slots cannot hold {experts} experts")
    if not np.all(np.isfinite(loads)) or np.any(np.asarray(loads) < 0):
        raise ValueError("loads must be finite and not negative: they count the rows that chose each expert")
    for what, size, parts in (
        ("slots", num_slots, ranks), ("experts", experts, groups), ("ranks", ranks, nodes),
    ):  # fmt: skip
        if size % parts:
            raise ValueError(f"{size} {what} cannot be shared evenly by {parts}")
    if groups % nodes:
        groups = nodes = 1
    loads = np.asarray(loads, np.float64)
    grouped = np.arange(experts).reshape(groups, -1)
    slots = []
    for node in pack_evenly(loads[grouped].sum(1), nodes):
        held = grouped[node].reshape(-1)
        # The published code numbers a node's experts by group in the order packed, and its ties follow that order.
        replicas = held[replicate(loads[held], num_slots // nodes, most=ranks // nodes)]
        counts = np.bincount(replicas, minlength=experts)
        packed = pack_evenly((loads / np.maximum(counts, 1))[replicas], ranks // nodes, replicas)
        slots.append(replicas[packed].reshape(-1))
    return np.concatenate(slots)


def balanced_placements(
    loads: Real[np.ndarray, "layers experts"], ranks: int, num_slots: int | None = None, groups: int = 1, nodes: int = 1
) -> list[Placement]:
    """One placement a layer from its own loads; by default as many slots as fit evenly, all of them in use.

    384 experts over 72 ranks: 432 slots, 48 of them replicas.
    """
    loads = np.asarray(loads)
    if loads.ndim != 2:
        raise ValueError(f"loads are [layers, experts], not {list(loads.shape)}")
    slots = num_slots or expert_slots(loads.shape[1], ranks)
    return [
        Placement(tuple(int(e) for e in rebalance(layer, slots, ranks, groups, nodes)), loads.shape[1])
        for layer in loads
    ]


def rank_loads(placement: Placement, loads: Real[np.ndarray, " experts"], ranks: int) -> Float[np.ndarray, " ranks"]:
    """Load of each rank when an expert's rows are shared evenly by its replicas."""
    held = np.array(placement.slot_experts)
    counts = np.bincount(held[held >= 0], minlength=placement.num_experts)
    share = np.asarray(loads, np.float64) / counts
    return np.where(held >= 0, share[held], 0.0).reshape(ranks, -1).sum(1)


def imbalance(placement: Placement, loads: Real[np.ndarray, " experts"], ranks: int) -> float:
    """Load of the fullest rank over the mean; 1 is perfect."""
    by_rank = rank_loads(placement, loads, ranks)
    return float(by_rank.max() / by_rank.mean())


def save_placements(path: str | Path, placements: Sequence[Placement]) -> None:
    """Writes one placement a layer as JSON."""
    content = {
        "format": FORMAT,
        "num_experts": placements[0].num_experts,
        "slot_experts": [list(placement.slot_experts) for placement in placements],
    }
    write_text(Path(path), json.dumps(content) + "\n")


def load_placements(path: str | Path, *, layers: int, num_experts: int, ranks: int) -> list[Placement]:
    """Reads what `save_placements` wrote, for a model and layout.

    Raises:
      ValueError: not such a file, or made for another number of layers, experts or ranks.
    """
    try:
        content = read_json(path)
        form, experts, rows = content["format"], content["num_experts"], content["slot_experts"]
    except (TextError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of expert placements ({error!r})") from error
    if form != FORMAT:
        raise ValueError(f"{path}: format is {form!r}; this version reads {FORMAT!r}")
    for what, found, wanted in (("experts", experts, num_experts), ("layers", len(rows), layers)):
        if found != wanted:
            raise ValueError(f"{path}: made for {found} {what}; the model has {wanted}")
    placements = []
    for layer, slots in enumerate(rows):
        if len(slots) % ranks:
            raise ValueError(f"{path}: layer {layer} has {len(slots)} slots, which {ranks} ranks cannot share evenly")
        try:
            placements.append(Placement(tuple(slots), experts))
        except ValueError as error:
            raise ValueError(f"{path}: layer {layer}: {error}") from None
    return placements
