"""The thread that owns the queue: requests and cancellations in, news out, one dispatch after the other."""

import asyncio
import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kimi_jax.decoding.session import Piece
from kimi_jax.decoding.snapshot import Snapshot
from kimi_jax.server.errors import ApiError
from kimi_jax.server.mailbox import Mailbox, News, Told
from kimi_jax.serving.events import Event
from kimi_jax.serving.plan import Admission, Request
from kimi_jax.serving.scheduler import Scheduler

RETRY_SECONDS = 1
"""When a client that finds the queue full may ask again."""
STOP_SECONDS = 5
"""What the thread may take to end: a dispatch, and what is in flight."""
REST_SECONDS = 5
"""Between signs of life while there is nothing to do."""


class RequestQueue(Protocol):
    """What the loop needs of an engine; `decoding.queue.Queue` is one."""

    admitted: Callable[[Admission], None]
    """Told of every request that gets a slot."""

    @property
    def scheduler(self) -> Scheduler:
        """Which says how many wait and run."""
        ...

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        ...

    def submit(self, request: Request) -> None:
        """Puts a request at the end. Raises ValueError where it can never fit."""
        ...

    def cancel(self, id: str, reason: str = "cancelled") -> Event | None:
        """Ends a request."""
        ...

    def step(self) -> Sequence[tuple[Event, Snapshot | None]]:
        """Runs a dispatch; news, with what was read of the devices."""
        ...

    def rest(self) -> None:
        """Called from time to time while there is nothing to do."""
        ...

    def close(self) -> None:
        """Ends all requests."""
        ...


class Listener:
    """Told by the engine's thread of what happens; this one does nothing with it."""

    def submitted(self, request: Request) -> None:
        """A request has reached the queue."""

    def admitted(self, id: str) -> None:
        """A request has got a slot."""

    def came(self, event: Event, snapshot: Snapshot | None) -> None:
        """A dispatch has brought something to a request."""

    def cancelled(self, id: str) -> None:
        """A request was ended by its client."""


class EngineLoop:
    """Runs a queue in a thread of its own, from an event loop's requests.

    `submit` and `cancel` are for the event loop; everything of the queue belongs to the thread.
    """

    def __init__(self, open_queue: Callable[[], RequestQueue], most: int, listener: Listener | None = None):
        """A loop that has not begun.

        Args:
          open_queue: makes the queue, compiled and ready; called in the thread.
          most: requests that may be under way, those that wait included.
          listener: told of everything, in the thread.
        """
        self.most = most
        self.failure: BaseException | None = None
        """What has ended the thread, where something has."""
        self.ready = False
        """Whether the queue is open."""
        self.queue: RequestQueue | None = None
        self._open_queue, self._listener = open_queue, listener or Listener()
        self._events: asyncio.AbstractEventLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._inbox: collections.deque[Request | str] = collections.deque()
        """Requests to submit, and ids to cancel, in order."""
        self._wake = threading.Condition()
        self._stopping = False
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; called on the event loop."""
        self._events = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be served, now or once the queue is open."""
        return self.failure is None

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        """Puts requests into the queue; their news come into the mailbox.

        Raises:
          ApiError: 429 where the queue is full, 503 where nothing is served.
        """
        if self.failure is not None:
            raise ApiError(503, "the engine has failed; the server ends", code="engine_dead")
        if not self.ready:
            raise ApiError(503, "the server is starting: the engine compiles its programs", headers=_RETRY)
        if len(self._mailboxes) + len(requests) > self.most:
            raise ApiError(
                429, f"the queue is full: {len(self._mailboxes)} requests are under way, and this one asks for "
                f"{len(requests)} more of {self.most}; try again later", code="queue_full", headers=_RETRY,
            )  # fmt: skip
        mailbox = Mailbox(requests)
        self._mailboxes |= dict.fromkeys(mailbox.open, mailbox)
        self._tell(requests)
        return mailbox

    def cancel(self, mailbox: Mailbox, ids: Sequence[str] | None = None) -> None:
        """Ends requests of a mailbox, by default all that have not ended; no news of them comes any more."""
        ended = [id for id in ([*mailbox.open] if ids is None else ids) if id in mailbox.open]
        for id in ended:
            del mailbox.open[id]
            self._mailboxes.pop(id, None)
        if ended:
            self._tell(ended)

    def _tell(self, entries: Sequence[Request | str]) -> None:
        with self._wake:
            self._inbox.extend(entries)
            self._wake.notify()

    async def opened(self) -> None:
        """Waits until the queue is open, or the thread has failed."""
        while not self.ready and self.failure is None:
            await self._changed.wait()
            self._changed.clear()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends all requests and the thread, which may be compiling: then this waits so many seconds and no more."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self.running:
            await asyncio.to_thread(self._thread.join, seconds)

    def _run(self) -> None:
        try:
            self.queue = self._open_queue()
            self.queue.admitted = self._admitted
            self._on_the_event_loop(self._is_open)
            try:
                self._serve(self.queue)
            finally:
                self.queue.close()
        except BaseException as error:
            self._on_the_event_loop(self._fail, error)

    def _serve(self, queue: RequestQueue) -> None:
        while True:
            with self._wake:
                while queue.idle and not self._inbox and not self._stopping:
                    if not self._wake.wait(REST_SECONDS):
                        queue.rest()
                if self._stopping:
                    return
                entries = [*self._inbox]
                self._inbox.clear()
            news: list[News] = []
            for entry in entries:
                if isinstance(entry, str):
                    if queue.cancel(entry) is not None:
                        self._listener.cancelled(entry)
                else:
                    news += self._submit(queue, entry)
            if not queue.idle:
                news += [self._news(event, snapshot) for event, snapshot in queue.step()]
            if news:
                self._on_the_event_loop(self._deliver, news)

    def _admitted(self, admission: Admission) -> None:
        self._listener.admitted(admission.id)
        if (mailbox := self._mailboxes.get(admission.id)) is not None:
            mailbox.cached.setdefault(admission.id, admission.cached)

    def _submit(self, queue: RequestQueue, request: Request) -> list[News]:
        self._listener.submitted(request)
        try:
            queue.submit(request)
        except ValueError as error:  # what could never fit was refused before; this is another's mistake, not the end
            return [News(Event(request.id, reason="error"), refusal=str(error))]
        return []

    def _news(self, event: Event, snapshot: Snapshot | None) -> News:
        self._listener.came(event, snapshot)
        mailbox = self._mailboxes.get(event.id)
        request = None if mailbox is None else mailbox.requests.get(event.id)
        if request is None:
            return News(event)
        settings, told, prompt = request.settings, None, []
        if settings.prompt_logprobs is not None and isinstance(event.extra, Piece):
            scored = event.extra.scored
            prompt = _told(scored.logprobs, scored.top.ids, scored.top.logprobs, settings.prompt_logprobs)
        if settings.logprobs is not None and snapshot is not None and snapshot.logprobs is not None:
            assert snapshot.top_ids is not None
            assert snapshot.top_logprobs is not None
            slot, count = event.slot, len(event.tokens)
            ids, beside = snapshot.top_ids[slot, :count], snapshot.top_logprobs[slot, :count]
            told = _told(snapshot.logprobs[slot, :count], ids, beside, settings.logprobs)
        return News(event, told, prompt)

    def _on_the_event_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._events is not None
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(function, *arguments)

    def _is_open(self) -> None:
        self.ready = True
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._changed.set()
        dead = ApiError(503, f"the engine has failed: {type(error).__name__}; the server ends", code="engine_dead")
        for mailbox in {id(mailbox): mailbox for mailbox in self._mailboxes.values()}.values():
            mailbox.fail(dead)
        self._mailboxes.clear()

    def _deliver(self, news: list[News]) -> None:
        for each in news:
            id = each.event.id
            mailbox = self._mailboxes.get(id) if each.event.reason is None else self._mailboxes.pop(id, None)
            if mailbox is not None:
                mailbox.put(each)


def _told(logprobs: Any, ids: Any, beside: Any, top: int) -> list[Told]:
    """Rows of NumPy arrays [tokens], [tokens, TOP] and [tokens, TOP], with so many of the most likely tokens."""
    rows = zip(logprobs.tolist(), ids[:, :top].tolist(), beside[:, :top].tolist(), strict=True)
    return [Told(logprob, [*zip(*pair, strict=True)]) for logprob, *pair in rows]


_RETRY = {"Retry-After": str(RETRY_SECONDS)}
