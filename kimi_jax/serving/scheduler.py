"""Which request gets which slot and pages, and what the next dispatch does: decided on the host, one plan at a time.

The rules:

- One queue, first come first served. A request is admitted when a group has a free slot, a free lane, and pages for the
  whole prompt, the first round and one page more for every slot that still grows; among such groups the one with most
  free pages, then most free slots, then the lowest index. A request that fits nowhere may be overtaken by later ones
  that fit, `overtakes` times at most. A plan fills at most `Shape.admissions` slots of each group.
- With the prefix cache, the group that holds most of a prompt's beginning is preferred, unless another has more than
  `MUCH_FREER` times its free pages. A request waits while another prefills a longer beginning of it, or where the
  group's lanes are free before so much would be prefilled elsewhere.
- Prefill never waits for pages. A plan holds one chunk: the oldest prompts of each group, one in a lane.
- Running slots take part in every plan, one round beside a chunk, else as many rounds as the shape offers: the fewest
  while requests wait, else the most that are needed. They get pages for all that is in flight
  and for this plan, oldest first; one without them pauses.
- When a group's slots all pause and nothing of it is in flight, its newest request gives its slot back and is computed
  again later, from the prompt and its tokens so far. After `PREEMPTIONS` times it waits until a group has its pages to
  the end, and keeps them.
- What is certain to end with what is in flight leaves its slot at once, and its pages when that has been read.
"""

import dataclasses
from collections.abc import Mapping

from kimi_jax.serving.events import Event, Seen
from kimi_jax.serving.group import Group, Opening, Room
from kimi_jax.serving.plan import Admission, Lane, Plan, Request, Shape
from kimi_jax.serving.work import Work

PREEMPTIONS = 2
"""Times that a request is preempted at most."""
MUCH_FREER = 2
"""Times the free pages of a group that holds a prompt's beginning, with which another is preferred."""


@dataclasses.dataclass
class _Flight:
    """A dispatch that was planned and not read yet, and whom it serves, by slot."""

    number: int
    rounds: int = 0
    sure: int = 0
    """Rounds that are not run again for want of an outcome."""
    running: dict[int, Work] = dataclasses.field(default_factory=dict)
    lanes: dict[int, Work] = dataclasses.field(default_factory=dict)
    ends: dict[int, int] = dataclasses.field(default_factory=dict)
    """How far lanes go in their prompts."""

    @property
    def works(self) -> dict[int, Work]:
        """All of them."""
        return self.lanes | self.running


class Scheduler:
    """The queue, the slots and the pages of all groups."""

    def __init__(self, shape: Shape, overtakes: int = 16, prefix_cache: bool = False, drafter_goes_on: bool = True):
        """A scheduler without requests.

        Args:
          overtakes: later requests that may be admitted before one that fits nowhere.
          prefix_cache: whether prompts that begin alike share pages, also with requests that have ended.
          drafter_goes_on: whether the drafter can go on with a text that begins in pages which another has filled.
            Where it cannot, prompts are run from their first token, and what they miss is counted.
        """
        self.shape = shape
        self.prompt_tokens = self.reused_tokens = 0
        """Tokens of all prompts that were admitted, and those of them that pages held already."""
        self.drafter_misses = 0
        """Tokens that pages held already and that were run all the same, for the drafter's sake."""
        self.preemptions = 0
        """Preemptions so far, of all requests."""
        self._overtakes = overtakes
        self._groups = [Group(shape, index, prefix_cache, drafter_goes_on) for index in range(shape.groups)]
        self._works: dict[str, Work] = {}
        self._queue: list[Work] = []
        self._flights: list[_Flight] = []
        self._released: set[int] = set()
        self._preempted: list[str] = []
        self._arrivals = self._plans = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to plan and nothing to read."""
        return not self._works and not self._flights

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def occupied(self) -> int:
        """Slots that belong to a request."""
        return sum(len(group.works) for group in self._groups)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free pages of each group."""
        return tuple(group.pool.free for group in self._groups)

    @property
    def in_flight(self) -> int:
        """Dispatches that were planned and not read."""
        return len(self._flights)

    def submit(self, request: Request) -> None:
        """Puts a request at the queue's end.

        Raises:
          ValueError: it could never fit, or one of the same id has not ended.
        """
        prompt, capacity = len(request.ids), self.shape.capacity
        if request.id in self._works:
            raise ValueError(f"request {request.id!r} is under way already; an id may be used again once it has ended")
        if prompt + request.limit > capacity:
            fits = capacity - prompt
            advice = f"a limit of {fits:,} would fit" if fits > 0 else "the prompt alone must be shorter than that"
            raise ValueError(
                f"request {request.id!r} needs room for {prompt + request.limit:,} tokens, {prompt:,} of its prompt "
                f"and {request.limit:,} of its answer, and there is room for {capacity:,}: {advice}"
            )
        work = Work(request, self._arrivals)
        self._arrivals += 1
        self._works[request.id] = work
        self._queue.append(work)

    def cancel(self, id: str, reason: str = "cancelled") -> Event | None:
        """Ends a request now, for a reason of the caller's; what is in flight for it is dropped.

        Returns its last event, or None where no such request is under way.
        """
        work = self._works.get(id)
        if work is None:
            return None
        slot = -1 if work.slot is None else work.slot
        if work.pages:
            self._groups[work.group].keep(work)
        self._end(work)
        return Event(id, reason=reason, slot=slot, reused=work.reused)

    def plan(self, most: int | None = None) -> Plan | None:
        """The next dispatch, or None where there is nothing to do before another one is read.

        Args:
          most: rounds that it may run at most, from 1; by default as many as the shape offers.
        """
        if len(self._flights) > self.shape.ahead:
            return None
        for group in self._groups:
            for work in [work for work in group.works.values() if work.complete]:
                self._vacate(work)
        runners = [work for group in self._groups for work in self._runners(group)]
        admissions = self._admissions()
        flight = _Flight(self._plans)
        lanes = [lane for group in self._groups for lane in self._lanes(group, flight)]
        if not lanes and not runners:
            return None
        flight.rounds = self._rounds(runners, bool(lanes), most)
        flight.sure = 0 if self.shape.rounds_repeat and not lanes else flight.rounds
        for work in runners:
            assert work.slot is not None
            work.flying_rounds += flight.rounds
            work.sure_rounds += flight.sure
            flight.running[work.slot] = work
        self._flights.append(flight)
        self._plans += 1
        active = tuple(sorted(flight.running))
        highest = max((slot % self.shape.slots_per_group for slot in active), default=-1)
        plan = Plan(
            flight.number,
            table=tuple(row for group in self._groups for row in group.changed_rows()),
            admissions=tuple(admissions),
            lanes=tuple(lanes),
            rounds=flight.rounds,
            slots=next(count for count in (0, *self.shape.slot_counts) if count > highest),
            active=active,
            released=tuple(sorted(self._released)),
            preempted=tuple(self._preempted),
        )
        self._released, self._preempted = set(), []
        return plan

    def observe(self, number: int, seen: Mapping[int, Seen]) -> list[Event]:
        """Takes in what a dispatch did; dispatches are read in their order.

        Args:
          number: of the plan.
          seen: by slot; slots that the plan did nothing for may be left out.

        Raises:
          ValueError: another dispatch is to be read first.
        """
        if not self._flights or self._flights[0].number != number:
            expected = f"number {self._flights[0].number} comes next" if self._flights else "none is in flight"
            raise ValueError(f"dispatch {number} was read, but {expected}")
        flight = self._flights.pop(0)
        for slot, work in flight.lanes.items():
            work.committed = flight.ends[slot]
            if work.committed == len(work.ids):
                work.flying_first = 0
        for work in flight.running.values():
            work.flying_rounds -= flight.rounds
            work.sure_rounds -= flight.sure
        under_way = [(slot, work) for slot, work in sorted(flight.works.items()) if not work.ended]
        events = [self._event(work, slot, seen.get(slot, Seen()), slot in flight.lanes) for slot, work in under_way]
        return [event for event in events if event is not None]

    def _event(self, work: Work, slot: int, seen: Seen, lane: bool) -> Event | None:
        request = work.request
        work.tokens += seen.tokens
        if len(work.tokens) > request.limit:
            raise RuntimeError(f"request {request.id!r} got {len(work.tokens)} tokens, more than its {request.limit}")
        reason = None
        if seen.failed >= 0:
            reason = "error"
        elif seen.finished or (lane and work.committed == len(work.ids) and not request.limit):
            reason = "stop" if work.tokens and work.tokens[-1] in request.settings.stop_ids else "length"
        if reason == "error":
            self._groups[work.group].distrust(work)
        elif lane or reason:
            self._groups[work.group].keep(work)
        if reason:
            self._end(work)
        if reason or seen.tokens or seen.extra is not None:
            return Event(request.id, tuple(seen.tokens), reason, seen.failed, slot, seen.extra, work.reused)
        return None

    def _end(self, work: Work) -> None:
        work.ended = True
        del self._works[work.request.id]
        if work.slot is not None:
            self._vacate(work)
        if work.pages:
            self._groups[work.group].release(work)
        else:  # only in the queue a work has none
            self._queue.remove(work)

    def _vacate(self, work: Work) -> None:
        assert work.slot is not None
        self._released.add(work.slot)
        self._groups[work.group].vacate(work)

    def _runners(self, group: Group) -> list[Work]:
        """Works that a round of this plan advances, with pages for it, if need be after preemptions."""
        while True:
            works = group.oldest_first()
            ready = [work for work in works if work.ready]
            runners = [work for work in ready if group.grow(work, work.needed(1, self.shape.depth))]
            if runners or not works or len(ready) < len(works) or self._flies(group):
                return runners
            self._preempt(group, [work for work in works if work.preemptions < PREEMPTIONS][-1])

    def _flies(self, group: Group) -> bool:
        """Whether something is in flight that may yet free pages of the group, or tell that fewer are needed."""
        works = (work for flight in self._flights for work in flight.works.values())
        return any(self._groups[work.group] is group and not work.ended for work in works)

    def _preempt(self, group: Group, work: Work) -> None:
        group.keep(work)
        self._vacate(work)
        group.release(work)
        work.recompute()
        self.preemptions += 1
        self._preempted.append(work.request.id)
        self._queue.append(work)
        self._queue.sort(key=lambda work: work.arrival)

    def _admissions(self) -> list[Admission]:
        admissions: list[Admission] = []
        blocked: list[Work] = []
        flying: dict[int, list[Work]] = {}
        for work in (work for flight in self._flights for work in flight.lanes.values() if not work.ended):
            flying.setdefault(work.group, []).append(work)
        admitted = [0] * self.shape.groups
        openings = {group.index: group.opening(flying.get(group.index, ())) for group in self._groups}
        for work in tuple(self._queue):
            found = [opening for opening in openings.values() if opening]
            if all(opening.lane_in for opening in found) or len(blocked) > self._overtakes:
                break
            if any(other.overtaken >= self._overtakes for other in blocked):
                break
            tokens = self._first_pages(work)
            room = self._room(work, tokens, found)
            if room is None:
                blocked.append(work)
                continue
            for other in blocked:
                other.overtaken += 1
            self._queue.remove(work)
            group = room.opening.group
            self.drafter_misses += group.missed(work)
            admission = group.admit(work, tokens, room.hit)
            admissions.append(admission)
            admitted[group.index] += 1
            full = admitted[group.index] == self.shape.admissions
            openings[group.index] = None if full else group.opening(flying.get(group.index, ()))
            self.prompt_tokens += admission.prompt
            self.reused_tokens += admission.cached
            work.reused = work.reused if work.preemptions else admission.cached
        return admissions

    def _room(self, work: Work, tokens: int, openings: list[Opening]) -> Room | None:
        """Where to admit a request now, if anywhere."""
        found = [opening.group.room(opening, work, tokens) for opening in openings]
        rooms = [room for room in found if room is not None]
        at_once = [room for room in rooms if not room.opening.lane_in]
        freest = max(at_once, key=lambda room: room.opening.freest, default=None)
        best = max(rooms, key=lambda room: (max(len(room.hit), room.coming), room.opening.freest), default=None)
        if best is None or not (best.hit or best.coming):
            return freest
        if freest is not None and freest.opening.freest[0] > MUCH_FREER * best.opening.freest[0]:
            return freest
        if best.coming or 0 < best.opening.lane_in <= len(best.hit) * self.shape.page_tokens:
            return None
        return freest if best.opening.lane_in else best

    def _first_pages(self, work: Work) -> int:
        """Tokens that need pages before a request is admitted."""
        return work.total if work.preemptions >= PREEMPTIONS else min(len(work.ids) + self.shape.depth + 1, work.total)

    def _lanes(self, group: Group, flight: _Flight) -> list[Lane]:
        lanes: list[Lane] = []
        for work in [work for work in group.oldest_first() if not work.ready][: self.shape.lanes]:
            assert work.slot is not None
            start = work.prefilled
            tokens = work.ids[start : start + self.shape.chunk]
            work.prefilled += len(tokens)
            work.flying_first = int(work.ready and work.request.limit > 0)
            following = work.request.following if work.ready else work.ids[work.prefilled]
            lanes.append(Lane(work.slot, start, tokens, work.ready, following))
            flight.lanes[work.slot], flight.ends[work.slot] = work, work.prefilled
        return lanes

    def _rounds(self, runners: list[Work], chunk: bool, most: int | None) -> int:
        """Rounds of this plan, with pages for all of them."""
        choices = [choice for choice in self.shape.rounds if most is None or choice <= most]
        if not runners:
            return 0
        if chunk or (self._queue and not self.shape.until_one_ends):
            return choices[0]
        wanted = max(work.request.limit - work.least for work in runners)
        enough = next((choice for choice in choices if choice >= wanted), choices[-1])
        for rounds in reversed(choices[: choices.index(enough) + 1]):
            tokens = {work: work.needed(rounds, self.shape.depth) for work in runners}
            missing = [0] * self.shape.groups
            for work in runners:
                missing[work.group] += self._groups[work.group].missing(work, tokens[work])
            if all(pages <= group.pool.free for pages, group in zip(missing, self._groups, strict=True)):
                for work in runners:
                    self._groups[work.group].grow(work, tokens[work])
                return rounds
        raise AssertionError("one round has its pages already")
