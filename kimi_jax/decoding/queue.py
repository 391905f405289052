"""Requests on their way through an engine's slots: the scheduler's plans run on the devices, and what came is told."""

import collections
import dataclasses
import json
from collections.abc import Callable

import numpy as np

from kimi_jax.decoding.automatic import AutomaticBudget
from kimi_jax.decoding.rebalance import Rebalancer
from kimi_jax.decoding.session import Ran, Session
from kimi_jax.decoding.snapshot import Snapshot
from kimi_jax.serving.events import Event, Seen
from kimi_jax.serving.plan import Admission, Plan, Request
from kimi_jax.serving.repeats import Repeats
from kimi_jax.serving.scheduler import Scheduler
from kimi_jax.serving.transport import Receiver, Sender


class Queue:
    """Requests in slots and those that wait for one. Every `step` is one dispatch.

    All processes that share the devices call it alike, with the same requests in the same order; or with a link
    process 0 alone, and the others `follow`.

    Args:
      session: with nobody in it.
      automatic: picks the rows that each dispatch verifies; without it they are those of the programs.
      rebalancer: moves experts between dispatches.
      beat: called whenever a dispatch has ended.
      link: to the other processes, or of another process to process 0.
    """

    def __init__(
        self,
        session: Session,
        automatic: AutomaticBudget | None = None,
        rebalancer: Rebalancer | None = None,
        beat: Callable[[], None] = lambda: None,
        link: Sender | Receiver | None = None,
    ):
        goes_on = session.programs.speculation.goes_on
        self.session = session
        self.scheduler = Scheduler(session.shape, prefix_cache=session.prefix_cache, drafter_goes_on=goes_on)
        self.rounds = 0
        """Rounds in which somebody's text went on."""
        self.slot_rounds = 0
        """Slots whose texts did, added up over the rounds."""
        self.admitted: Callable[[Admission], None] = lambda admission: None
        """Told of every request that gets a slot, when the dispatch is sent that it begins with."""
        self._automatic, self._rebalancer, self._beat, self._link = automatic, rebalancer, beat, link
        self._flying: collections.deque[Ran] = collections.deque()
        self._repeats = Repeats()
        self._under_way: dict[str, None] = {}
        self._totals = np.zeros((session.shape.slots, 2), int)
        if rebalancer is not None:
            rebalancer.begin()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return self.scheduler.idle

    def submit(self, request: Request) -> None:
        """Puts a request at the end.

        Raises:
          ValueError: it can never fit; the error says what would.
        """
        self.scheduler.submit(request)
        self._under_way[request.id] = None

    def cancel(self, id: str, reason: str = "cancelled") -> Event | None:
        """Ends a request; its last event, or None where it is not under way."""
        self._under_way.pop(id, None)
        return self.scheduler.cancel(id, reason)

    def step(self) -> list[tuple[Event, Snapshot]]:
        """Runs the next dispatch, and tells what has come of an earlier one or of this.

        An event's `extra` is the `session.Piece` of a prompt whose log-probabilities are wanted.
        On GPUs a dispatch is sent before the one before it is read, so that they never wait for the host.
        """
        rows = most = plan = None
        if self._automatic is not None:
            rows, most = self._automatic.next(self.session.shape.rounds[-1], self.scheduler.occupied or 1)
        if self._rebalancer is not None:
            flying = sum(ran.plan.rounds for ran in self._flying)
            left = self._rebalancer.rounds_left(self.rounds + flying)
            most = left if most is None else min(most, left)
        exact = self._repeats.next()
        if not (self._flying and self._moves_are_due):
            plan = self.scheduler.plan(1 if exact else most)
        if plan is not None and plan.rounds:
            # Beside a chunk nothing has to be run again, and such a round does for a repeated one.
            plan = dataclasses.replace(plan, exact=exact and not plan.lanes)
            self._repeats.sent(exact)
        if plan is not None:
            self._tell(rows=rows, plan=plan.to_json())
            self._flying.append(self.session.run(plan, rows))
            for admission in plan.admissions:
                self.admitted(admission)
        if self._flying and (plan is None or len(self._flying) > self.session.shape.ahead):
            return self._read(self._flying.popleft())
        return []

    def _read(self, ran: Ran) -> list[tuple[Event, Snapshot]]:
        snapshot, prompts = ran.read(), ran.prompts()
        self._beat()
        slots = {*ran.plan.active, *(lane.slot for lane in ran.plan.lanes)}
        seen = {
            slot: Seen(
                tuple(snapshot.tokens[slot, : snapshot.counts[slot]].tolist()),
                bool(snapshot.finished[slot]),
                int(snapshot.failed[slot]),
                prompts.get(slot),
            )
            for slot in sorted(slots)
        }
        if ran.plan.rounds:
            self._repeats.observe(bool(snapshot.overflowed.any()), ran.plan.exact or bool(ran.plan.lanes))
        self._learn(ran, snapshot)
        events = self.scheduler.observe(ran.plan.number, seen)
        for event in events:
            if event.reason is not None:
                self._under_way.pop(event.id)
        if self._moves_are_due and not self._flying:
            self._tell(rounds=self.rounds)
            self._move(self.rounds)
        return [(event, snapshot) for event in events]

    def _move(self, rounds: int) -> None:
        """Lets experts move; nothing is in flight."""
        assert self._rebalancer is not None
        self.session.state = self._rebalancer.after(rounds, self.session.parameters, self.session.state)

    def _learn(self, ran: Ran, snapshot: Snapshot) -> None:
        """Counts the rounds that a dispatch has run, and tells the automatic budget of them and of their tokens."""
        self._totals[[admission.slot for admission in ran.plan.admissions]] = 0
        totals = np.stack([snapshot.round_tokens[:, 0], snapshot.round_tokens.sum(1)], axis=1)
        active = list(ran.plan.active)
        if active:
            new = (totals - self._totals)[active]
            self._totals[active] = totals[active]
            self.rounds += int(new[:, 0].max())
            self.slot_rounds += int(new[:, 0].sum())
            if self._automatic is not None:
                self._automatic.observe(ran.rows, *new.sum(0).tolist())

    @property
    def _moves_are_due(self) -> bool:
        """Whether experts are to be moved, which waits until nothing is in flight."""
        return self._rebalancer is not None and self._rebalancer.is_due(self.rounds)

    def rest(self) -> None:
        """Says to watchdogs, those of the other processes too, that all is well though there is nothing to do."""
        self._beat()
        if isinstance(self._link, Sender):
            self._link.send("")

    def _tell(self, **order: object) -> None:
        """Lets the other processes do the same."""
        if isinstance(self._link, Sender):
            self._link.send(json.dumps(order))

    def follow(self) -> None:
        """Does what process 0 does, until it closes its queue.

        Raises:
          TransportError: process 0 went away.
        """
        assert isinstance(self._link, Receiver), "process 0 leads"
        while (text := self._link.receive()) is not None:
            self._beat()
            order = json.loads(text or "{}")
            if "plan" in order:
                self._flying.append(self.session.run(Plan.from_json(order["plan"]), order["rows"]))
            # Process 0 has read its older dispatches: what is not read here only piles up.
            while self._flying and ("rounds" in order or len(self._flying) > self.session.shape.ahead + 1):
                self._flying.popleft().read()
            if "rounds" in order:
                self._move(order["rounds"])
        self._link.close()

    def close(self) -> None:
        """Ends all requests and reads what is in flight, so that the session is empty; processes that follow end."""
        for id in [*self._under_way]:
            self.cancel(id)
        while self._flying:
            self._read(self._flying.popleft())
        if isinstance(self._link, Sender):
            self._link.close()
