"""A device in plain Python: it executes plans, keeps tokens in pages, and draws next tokens from what it reads there.

A token depends on the request's key, its position and all tokens before it as pages hold them: a page that was lost,
taken away too early or never filled changes the text. `alone` says what a request's text is without any of it.
"""

import dataclasses
import random
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kimi_jax.serving.events import Event, Seen
from kimi_jax.serving.plan import Admission, Plan, Request, Settings, Shape, update_table
from kimi_jax.serving.scheduler import Scheduler

VOCABULARY = 50


def draw(settings: Settings, context: np.ndarray, emitted: int) -> int:
    """The token that follows a context int32 [tokens]."""
    salt = zlib.crc32(context.tobytes(), settings.key[0])
    token = zlib.crc32(f"{settings.key} {len(context)}".encode(), salt) % VOCABULARY
    while token in settings.stop_ids and emitted < settings.min_tokens:
        token = (token + 1) % VOCABULARY
    return token


def accepted(settings: Settings, position: int, depth: int) -> int:
    """Drafts that a round accepts at a position."""
    return zlib.crc32(f"drafts {settings.key} {position}".encode()) % (depth + 1)


def alone(request: Request) -> tuple[int, ...]:
    """The whole text of a request."""
    context, text = list(request.ids), []
    while len(text) < request.limit and not (text and text[-1] in request.settings.stop_ids):
        text.append(draw(request.settings, np.array(context, np.int32), len(text)))
        context.append(text[-1])
    return tuple(text)


@dataclasses.dataclass
class Slot:
    """State of a slot: admission, cached length, tokens emitted, anchor."""

    admission: Admission
    length: int = 0
    emitted: int = 0
    anchor: int = -1
    ready: bool = False
    finished: bool = False


class Device:
    """Executes plans in their order and checks of each what a compiled program would silently take."""

    def __init__(
        self, shape: Shape, fails: Callable[[str, int], bool] = lambda id, position: False,
        overflows: Callable[[int, int], bool] = lambda number, group: False,
    ):  # fmt: skip
        """`overflows` says in which dispatches a group's rounds give nothing."""
        self.shape, self.fails, self.overflows = shape, fails, overflows
        self.memory = np.full((shape.groups, shape.pages, shape.page_tokens), -1, np.int32)
        self.table = shape.table()
        self.slots: dict[int, Slot] = {}
        self.number = -1
        self.sharing = False
        self.slot_rounds = self.used = self.rounds = 0
        self.rounds_of: dict[str, int] = {}
        """Rounds that each request took part in."""

    def run(self, plan: Plan) -> dict[int, Seen]:
        """Executes a plan."""
        shape = self.shape
        assert plan.number == self.number + 1
        self.number = plan.number
        update_table(self.table, plan, shape.no_page)
        self._check(plan)
        for admission in plan.admissions:
            self.slots[admission.slot] = Slot(admission, length=admission.cached)
            assert admission.cached % shape.page_tokens == 0
            assert admission.cached < admission.prompt
        running = [s for s in plan.active if self.slots[s].ready and not self.slots[s].finished]
        tokens: dict[int, list[int]] = {slot: [] for slot in range(shape.slots)}
        failed = dict.fromkeys(range(shape.slots), -1)
        for lane in plan.lanes:
            slot = self.slots[lane.slot]
            if slot.finished:  # it failed in the chunk before, which the host had not read
                continue
            assert lane.start == slot.length >= 0
            assert not slot.ready
            self._write(lane.slot, lane.start, lane.tokens)
            broken = [p for p in range(slot.length, slot.length + len(lane.tokens)) if self.fails(slot.admission.id, p)]
            slot.length += len(lane.tokens)
            assert slot.length <= slot.admission.prompt
            if broken:
                failed[lane.slot], slot.finished = broken[0], True
                continue
            assert lane.last == (slot.length == slot.admission.prompt)
            if lane.last:
                slot.ready = True
                if slot.admission.limit:
                    self._emit(lane.slot, [self._next(lane.slot)], tokens, failed)
        for _ in range(plan.rounds):
            self.rounds += 1
            self.slot_rounds += shape.slots
            for index in running:
                lost = shape.rounds_repeat and not plan.lanes and self.overflows(plan.number, shape.group(index))
                if not self.slots[index].finished and not lost:
                    self.used += 1
                    id = self.slots[index].admission.id
                    self.rounds_of[id] = self.rounds_of.get(id, 0) + 1
                    self._round(index, tokens, failed)
        return {s: Seen(tuple(tokens[s]), s in self.slots and self.slots[s].finished, failed[s]) for s in tokens}

    def _round(self, index: int, tokens: dict[int, list[int]], failed: dict[int, int]) -> None:
        slot, shape = self.slots[index], self.shape
        total = slot.admission.prompt + slot.admission.limit
        needed = shape.pages_for(min(slot.length + shape.depth + 1, total))
        assert (self.table[index, :needed] < shape.pages).all(), "a position without a page"
        drawn: list[int] = []
        for _ in range(1 + accepted(slot.admission.settings, slot.length, shape.depth)):
            self._write(index, slot.length, [slot.anchor])
            slot.length += 1
            slot.anchor = self._next(index, len(drawn))
            drawn.append(slot.anchor)
        self._emit(index, drawn, tokens, failed)

    def _emit(self, index: int, drawn: list[int], tokens: dict[int, list[int]], failed: dict[int, int]) -> None:
        slot = self.slots[index]
        for token in drawn:
            if self.fails(slot.admission.id, slot.admission.prompt + slot.emitted):
                failed[index], slot.finished = slot.admission.prompt + slot.emitted, True
                return
            tokens[index].append(token)
            slot.emitted += 1
            slot.anchor = token
            if slot.emitted == slot.admission.limit or token in slot.admission.settings.stop_ids:
                slot.finished = True
                return

    def _write(self, index: int, start: int, tokens: Sequence[int]) -> None:
        group = self.shape.group(index)
        for position, token in enumerate(tokens, start):
            tile, offset = divmod(position, self.shape.page_tokens)
            page = self.table[index, tile] if tile < self.shape.tiles else self.shape.no_page
            if page < self.shape.pages:
                rows = self.table[group * self.shape.slots_per_group : (group + 1) * self.shape.slots_per_group]
                assert (rows == page).sum() == 1, "a page that others read is written"
                self.memory[group, page, offset] = token

    def _next(self, index: int, more: int = 0) -> int:
        slot = self.slots[index]
        pages = self.table[index, : self.shape.pages_for(slot.length)]
        if (pages >= self.shape.pages).any():  # behind the limit: what is drawn there is cut
            assert slot.length > slot.admission.prompt + slot.admission.limit
            return -1
        context = self.memory[self.shape.group(index), pages].reshape(-1)[: slot.length]
        return draw(slot.admission.settings, context, slot.admission.emitted + slot.emitted + more)

    def _check(self, plan: Plan) -> None:
        shape = self.shape
        per_group = [shape.group(lane.slot) for lane in plan.lanes]
        assert all(per_group.count(group) <= shape.lanes for group in per_group)
        assert len({lane.slot for lane in plan.lanes}) == len(plan.lanes)
        assert all(0 < len(lane.tokens) <= shape.chunk for lane in plan.lanes)
        assert not {lane.slot for lane in plan.lanes} & set(plan.active)
        assert plan.rounds in ((0, 1) if plan.lanes else shape.rounds)
        assert bool(plan.rounds) == bool(plan.active)
        assert plan.slots in (shape.slot_counts if plan.rounds else (0,))
        assert all(slot % shape.slots_per_group < plan.slots for slot in plan.active)
        into = [shape.group(admission.slot) for admission in plan.admissions]
        assert all(into.count(group) <= shape.admissions for group in into)
        assert (self.table >= 0).all()
        assert (self.table <= shape.pages).all()
        self.check_pages()

    def check_pages(self) -> None:
        """No page of a group is in two rows of the table, unless they are shared, or twice in one."""
        for row in self.table:
            assert len(set(row[row < self.shape.pages].tolist())) == (row < self.shape.pages).sum()
        for group in np.split(self.table, self.shape.groups):
            pages = group[group < self.shape.pages]
            assert self.sharing or len(set(pages.tolist())) == len(pages)


@dataclasses.dataclass
class Outcome:
    """What became of a request."""

    text: tuple[int, ...] = ()
    reason: str | None = None
    failed: int = -1


class Host:
    """A scheduler and a device with up to `ahead` dispatches in flight, step by step."""

    def __init__(self, shape: Shape, device: Device | None = None, **options: int):
        self.scheduler = Scheduler(shape, **options)
        self.device = device or Device(shape)
        self.device.sharing = bool(options.get("prefix_cache"))
        self.outcomes: dict[str, Outcome] = {}
        self.plans: list[Plan] = []
        self._flying: list[tuple[int, dict[int, Seen]]] = []

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.submit(request)
            self.outcomes[request.id] = Outcome()

    def cancel(self, id: str, reason: str = "cancelled") -> None:
        event = self.scheduler.cancel(id, reason)
        if event:
            self._take(event)

    def step(self) -> list[Event]:
        """One plan, if there is something to do, and then the oldest dispatch, if as many are in flight as may be."""
        plan = self.scheduler.plan()
        if plan:
            plan = Plan.from_json(plan.to_json())
            self.plans.append(plan)
            self._flying.append((plan.number, self.device.run(plan)))
        if self._flying and (plan is None or len(self._flying) > self.scheduler.shape.ahead):
            events = self.scheduler.observe(*self._flying.pop(0))
            for event in events:
                self._take(event)
            return events
        assert plan or self.scheduler.idle, "requests wait and nothing moves"
        return []

    def finish(self, most: int = 100_000) -> None:
        """Steps until all is done."""
        for _ in range(most):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps")

    def _take(self, event: Event) -> None:
        outcome = self.outcomes[event.id]
        assert outcome.reason is None, "news of a request that has ended"
        outcome.text += event.tokens
        outcome.reason, outcome.failed = event.reason, event.failed

    def check_empty(self) -> None:
        """Nothing is left behind."""
        scheduler, shape = self.scheduler, self.scheduler.shape
        assert scheduler.idle
        assert scheduler.occupied == scheduler.waiting == scheduler.in_flight == 0
        assert scheduler.free_pages == (shape.pages,) * shape.groups


def requests(
    count: int,
    seed: int,
    prompt: Callable[[random.Random], int],
    limit: Callable[[random.Random], int],
    **settings: int,
) -> Iterator[Request]:
    """Random requests, their ids numbers as text."""
    drawn = random.Random(seed)
    for number in range(count):
        ids = tuple(drawn.randrange(VOCABULARY) for _ in range(prompt(drawn)))
        key = (drawn.getrandbits(32), drawn.getrandbits(32))
        yield Request(str(number), ids, limit(drawn), Settings(key=key, **settings))
