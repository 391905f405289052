"""One state on the devices and the plans that change it: what the host decides becomes arrays, what came is read."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.sampling import Draws, Kind, Sampling, Samplings
from kimi_jax.decoding.snapshot import Columns, Snapshot
from kimi_jax.decoding.state import NO_TOKEN, STOPS, Admissions, Asked, DecodeState, Dispatch, Hits, Lanes, Scored
from kimi_jax.decoding.step import TOP
from kimi_jax.parallel import host_arrays
from kimi_jax.parallel.sharding import REQUESTS
from kimi_jax.parameters import Parameters
from kimi_jax.serving.plan import Admission, Lane, Plan, Settings, Shape, TableRow, update_table
from kimi_jax.vision.encoder import Encoder
from kimi_jax.vision.media import NO_TOWER, Medium, MediumError, Placed

ALL_NODES = np.iinfo(np.int32).max
LEAST_TILES = 16
"""Chunks behind cached text are compiled for none, this many and powers of four times as many cached tiles."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """A dispatch on its way."""

    plan: Plan
    columns: Columns
    told: tuple[Array, ...]
    rows: int
    """Of a round's trees, the root included."""
    scored: dict[int, tuple[int, Lane]] = dataclasses.field(default_factory=dict)
    """Lanes whose requests want log-probabilities of their prompts, by slot, with their places among the lanes."""

    def read(self) -> Snapshot:
        """Waits for it, and gives what came."""
        return self.columns.unpack(np.asarray(self.told[0]))

    def prompts(self) -> dict[int, "Piece"]:
        """What came of prompts whose log-probabilities are wanted, by slot."""
        if not self.scored:
            return {}
        packed = np.asarray(self.told[1])
        counts = {slot: len(lane.tokens) - (lane.following is None) for slot, (_, lane) in self.scored.items()}
        return {
            slot: Piece(lane.start, Scored.unpack(packed[place, : counts[slot]]))
            for slot, (place, lane) in self.scored.items()
        }


@dataclasses.dataclass(frozen=True)
class Piece:
    """Log-probabilities of a piece of a prompt."""

    start: int
    """Row of the prompt with which it begins; what is told is of the token behind each row."""
    scored: Scored


class Session:
    """Slots and pages on a mesh for as long as it lives. All processes run the same plans on it.

    Args:
      programs: without log-probabilities and for greedy requests; those of other kinds are made when they are wanted.
      parameters: of the engine, in which a rebalancer may exchange arrays.
      shape: of the slots.
      encoder: sees the images of prompts; None for a model of text alone.
      prefix_cache: whether plans let prompts that begin alike share pages.
    """

    def __init__(
        self,
        programs: Programs,
        parameters: Parameters,
        shape: Shape,
        encoder: Encoder | None = None,
        prefix_cache: bool = False,
    ):
        self.programs, self.shape, self.encoder, self.prefix_cache = programs, shape, encoder, prefix_cache
        self.parameters: Parameters = {name: parameters[name] for name in programs.needs}
        capacity = shape.tiles * shape.page_tokens
        self.state: DecodeState = programs.start(
            slots=shape.slots, pages=shape.groups * shape.pages, capacity=capacity, shared=prefix_cache
        )
        self._table = shape.table()
        self._settings: dict[int, Settings] = {}
        self._seen: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._placed: tuple[bytes, Dispatch] | None = None

    def run(self, plan: Plan, rows: int | None = None) -> Ran:
        """Sends a plan to the devices without waiting; with trees of so many rows, or of those of the programs."""
        self._admit(plan)
        programs = self._programs(plan, self._draws(plan), rows)
        ran = self._send(programs, plan, self._slots(plan), self._tiles(plan.lanes))
        wants = [lane for lane in plan.lanes if self._settings[lane.slot].prompt_logprobs is not None]
        if not wants:
            return ran
        places = self._in_groups(plan.lanes, self.shape.lanes)
        return dataclasses.replace(ran, scored={lane.slot: (place, lane) for place, lane in places if lane in wants})

    def _programs(self, plan: Plan, draws: Draws, rows: int | None) -> Programs:
        """What runs a plan. A chunk alone knows nothing of trees: those of all sizes share it."""
        programs = self.programs if rows is None or not plan.rounds else self.programs.with_rows(rows)
        programs = programs.drawing(draws)
        return programs.exactly() if plan.exact else programs

    def _send(self, programs: Programs, plan: Plan, slots: int, tiles: int) -> Ran:
        """Runs a plan on the first slots of each group, behind at most so many tiles of cached text."""
        arguments: list[Any] = [self.parameters, self.state, self.now(plan.active)]
        if plan.lanes:
            program = programs.mixed(slots, tiles) if plan.rounds else programs.chunk(slots, tiles)
            scores = programs.draws.prompt is not None
            arguments.append(jax.tree.map(self._place, self.lanes(plan.lanes, scores)))
            width = programs.steps if plan.rounds else 1
        else:
            most = self.shape.rounds[-1] if programs.ends_early else plan.rounds
            program, width = programs.decode(slots, most, self.shape.until_one_ends), most * programs.steps
            if programs.ends_early:
                arguments.append(np.int32(plan.rounds))
        self.state, told = program(*arguments)
        for array in told:
            array.copy_to_host_async()
        return Ran(plan, programs.columns(width), told, programs.rows)

    def warm(self, draws: Iterable[Draws] = (Draws(),), rows: Iterable[int | None] = (None,)) -> None:
        """Compiles all that requests of these kinds can want, with trees of so many rows, by dispatches for nobody."""
        nobody = Lane(0, 0, (), False)
        tiles = sorted({self._tiles([dataclasses.replace(nobody, start=start)]) for start in self._starts})
        lanes = [Plan(0, lanes=(nobody,), rounds=rounds) for rounds in (0, 1)]
        loops = [Plan(0, rounds=rounds) for rounds in self.shape.rounds]
        for each, count, slots in itertools.product(draws, rows, self.shape.slot_counts):
            for plan, behind in [*itertools.product(lanes, tiles), *((plan, 0) for plan in loops)]:
                self._send(self._programs(plan, each, count), plan, slots, behind).read()
            if self.shape.rounds_repeat:
                again = dataclasses.replace(loops[0], exact=True)
                self._send(self._programs(again, each, count), again, slots, 0).read()
        if self.state.context_pages is not None:
            self._restore([None] * self.shape.groups)

    @property
    def _starts(self) -> Iterable[int]:
        """Where chunks of a prompt can begin."""
        return range(0, self.shape.tiles * self.shape.page_tokens, min(self.shape.chunk, self.shape.page_tokens))

    def _admit(self, plan: Plan) -> None:
        """Takes over a plan's pages and lets its requests into their slots."""
        update_table(self._table, plan, self.shape.no_page)
        for admission in plan.admissions:
            self._settings[admission.slot] = admission.settings
        if plan.admissions:
            self._see(plan.admissions)
            self.state = self.programs.admit(self.state, jax.tree.map(self._place, self.admissions(plan.admissions)))
        hits = [admission for admission in plan.admissions if admission.cached]
        if self.state.context_pages is not None:
            groups = range(self.shape.groups)
            by_group = [[each for each in hits if self.shape.group(each.slot) == group] for group in groups]
            for wave in itertools.zip_longest(*by_group):
                self._restore(wave)

    def _restore(self, hits: Sequence[Admission | None]) -> None:
        """Lets the drafter go on with prompts that begin in kept pages, one of each group or none."""
        shape = self.shape
        slots = np.full(shape.groups, shape.slots_per_group, np.int32)
        lengths, pages = np.zeros(shape.groups, np.int32), np.zeros((shape.groups, shape.tiles), np.int32)
        for group, each in enumerate(hits):
            if each is not None:
                slots[group], lengths[group] = each.slot % shape.slots_per_group, each.cached
                pages[group] = self._table[each.slot]
        placed = Hits(self._place(slots), self._place(lengths), self._place(pages))
        self.state = self.programs.restore(self.state, placed)

    def placed(self, ids: Sequence[int], media: Sequence[Medium]) -> tuple[Sequence[int], tuple[Placed, ...]]:
        """A prompt as requests have it: numbers of content stand where its images are.

        Raises:
          MediumError: the checkpoint has no tower, or placeholders and images disagree.
        """
        if not media:
            return ids, ()
        if self.encoder is None:
            raise MediumError(NO_TOWER)
        return self.encoder.place(ids, media)

    def _see(self, admissions: Sequence[Admission]) -> None:
        """Runs the images of new requests through the tower; their rows wait on the host for the lanes.

        Images whose places kept pages hold are not looked at again.
        """
        wanted = [
            (admission.slot, placed)
            for admission in admissions
            for placed in admission.media
            if placed.first + placed.medium.tokens > admission.cached
        ]
        self._seen |= {admission.slot: [] for admission in admissions}
        if not wanted:
            return
        assert self.encoder is not None, "media are refused where there is no tower"
        rows = self.encoder([(self.shape.group(slot), placed.medium) for slot, placed in wanted])
        for (slot, placed), found in zip(wanted, rows, strict=True):
            if found is not None:  # None stands for another process's
                self._seen[slot].append((placed.first, found))

    def _embeddings(self, lanes: Sequence[tuple[int, Lane]]) -> np.ndarray | None:
        """What stands for the tokens of lanes that are places of images; None where no lane has any."""
        given: np.ndarray | None = None
        for place, lane in lanes:
            for first, rows in self._seen.get(lane.slot, ()):
                start, end = max(first, lane.start), min(first + len(rows), lane.start + len(lane.tokens))
                if start >= end:
                    continue
                if given is None:
                    hidden = self.programs.model.config.hidden_size
                    given = np.zeros((self.shape.groups * self.shape.lanes, self.shape.chunk, hidden), rows.dtype)
                given[place, start - lane.start : end - lane.start] = rows[start - first : end - first]
            if lane.last:
                self._seen.pop(lane.slot, None)
        return given

    def _place(self, values: np.ndarray) -> Array:
        return host_arrays.place(values, self.programs.mesh, REQUESTS)

    def now(self, active: Sequence[int]) -> Dispatch:
        """The page table and the active slots on the devices; those of the last dispatch where nothing has changed."""
        runs = np.zeros(self.shape.slots, bool)
        runs[list(active)] = True
        key = self._table.tobytes() + runs.tobytes()
        if self._placed is None or self._placed[0] != key:
            self._placed = key, Dispatch(self._place(self._table.copy()), self._place(runs))
        return self._placed[1]

    def _slots(self, plan: Plan) -> int:
        """Slots of a group that the dispatch computes: the fewest that are compiled and hold all it is about."""
        used = [*plan.active, *(lane.slot for lane in plan.lanes)]
        highest = max(slot % self.shape.slots_per_group for slot in used)
        return next(count for count in self.shape.slot_counts if count > highest)

    def _tiles(self, lanes: Sequence[Lane]) -> int:
        """Tiles of cached text that lanes are compiled for: no loop's length may be known only at run time."""
        needed, tiles = max((-(-lane.start // self.shape.page_tokens) for lane in lanes), default=0), 0
        while tiles < needed:
            tiles = max(4 * tiles, LEAST_TILES)
        return min(tiles, self.shape.tiles)

    def _draws(self, plan: Plan) -> Draws:
        """What the requests of a dispatch ask of the program."""
        asked = [self._settings[slot] for slot in {*plan.active, *(lane.slot for lane in plan.lanes)}]
        hot = [sampling for each in asked if not (sampling := _sampling(each)).greedy]
        filters = any(sampling.filters for sampling in hot) or any(each.min_tokens for each in asked)
        kind: Kind = "filters" if filters else "temperature" if hot else "greedy"
        told = [self._settings[lane.slot].prompt_logprobs for lane in plan.lanes]
        prompt = None if all(top is None for top in told) else TOP if any(told) else 0
        return Draws(kind, any(each.logprobs is not None for each in asked), prompt)

    def lanes(self, lanes: Sequence[Lane], scores: bool = False) -> Lanes:
        """Pieces of prompts as NumPy arrays, over all groups, perhaps with the token behind each row."""
        shape = self.shape
        count = shape.groups * shape.lanes
        tokens = np.zeros((count, shape.chunk), np.int32)
        counts, last = np.zeros(count, np.int32), np.zeros(count, bool)
        slots = np.full(count, shape.slots_per_group, np.int32)
        behind = np.zeros_like(tokens)
        placed = self._in_groups(lanes, shape.lanes)
        for place, lane in placed:
            tokens[place, : len(lane.tokens)] = lane.tokens
            followed = (*lane.tokens[1:], *(() if lane.following is None else (lane.following,)))
            behind[place, : len(followed)] = followed
            counts[place], last[place] = len(lane.tokens), lane.last
            slots[place] = lane.slot % shape.slots_per_group if lane.tokens else shape.slots_per_group
        following, seen = behind if scores else None, self._embeddings(placed)
        return Lanes(tokens, counts, slots, last, following, seen)  # pyright: ignore[reportArgumentType]

    def admissions(self, admissions: Sequence[Admission]) -> Admissions:
        """Requests that come into slots as NumPy arrays, over all groups."""
        shape = self.shape
        count = shape.groups * shape.admissions
        slots = np.full(count, shape.slots_per_group, np.int32)
        keys, stops = np.zeros((count, 2), np.uint32), np.full((count, STOPS), NO_TOKEN, np.int32)
        lengths, limits, budgets, least = np.zeros((4, count), np.int32)
        sampling = [Sampling()] * count
        for place, each in self._in_groups(admissions, shape.admissions):
            wanted = each.settings
            slots[place] = each.slot % shape.slots_per_group
            keys[place], limits[place], lengths[place] = wanted.key, each.limit, each.cached
            stops[place, : len(wanted.stop_ids)] = wanted.stop_ids
            budgets[place] = ALL_NODES if wanted.budget is None else wanted.budget
            least[place] = each.prompt - each.emitted + wanted.min_tokens if wanted.min_tokens else 0
            sampling[place] = _sampling(wanted)
        asked = Asked(keys, limits, stops, budgets, least, Samplings.of(sampling))  # pyright: ignore[reportArgumentType]
        return Admissions(slots, lengths, asked)  # pyright: ignore[reportArgumentType]

    def _in_groups[T: Admission | Lane](self, entries: Sequence[T], room: int) -> list[tuple[int, T]]:
        """Entries with their places in an array that has `room` for each group."""
        taken = [0] * self.shape.groups
        placed = []
        for entry in entries:
            group = self.shape.group(entry.slot)
            placed.append((group * room + taken[group], entry))
            taken[group] += 1
        return placed

    def slots_in_turn(self, requests: int) -> tuple[int, ...]:
        """Slots of so many requests that are dealt out to the groups in turn."""
        shape = self.shape
        return tuple(index % shape.groups * shape.slots_per_group + index // shape.groups for index in range(requests))

    def fill(self, prompts: Sequence[Sequence[int]], cached: int = 0) -> Dispatch:
        """Runs prompts in slots of their own, with all pages that a slot can have, for programs that are timed alone.

        Of the first `cached` tokens of each the pages stay as they are. Returns what rounds that go on with all of them
        take.
        """
        shape = self.shape
        slots = self.slots_in_turn(len(prompts))
        each = min(shape.tiles, shape.pages // shape.slots_per_group)
        firsts = [slot % shape.slots_per_group * each for slot in slots]
        table = [TableRow(slot, 0, tuple(range(at, at + each))) for slot, at in zip(slots, firsts, strict=True)]
        pairs = [*zip(slots, map(tuple, prompts), strict=True)]
        room = each * shape.page_tokens
        update_table(self._table, Plan(0, table=tuple(table)), shape.no_page)
        for first in range(0, len(pairs), shape.groups * shape.lanes):
            wave = pairs[first : first + shape.groups * shape.lanes]
            new = [Admission(slot, "", len(ids), room - len(ids), 0, Settings(), cached) for slot, ids in wave]
            self._admit(Plan(0, admissions=tuple(new)))
            for start in range(cached, max(len(ids) for _, ids in wave), shape.chunk):
                pieces = [(slot, ids[start:], ids[start : start + shape.chunk]) for slot, ids in wave]
                lanes = [Lane(slot, start, now, left == now) for slot, left, now in pieces if now]
                self.run(Plan(0, lanes=tuple(lanes)))
        return self.now(slots)


def _sampling(settings: Settings) -> Sampling:
    return Sampling(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
