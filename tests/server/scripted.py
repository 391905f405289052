"""An engine that writes what a test says, behind the real scheduler; and the real server on it, in a thread."""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kimi_jax.decoding.session import Piece
from kimi_jax.decoding.state import Scored, Top
from kimi_jax.decoding.step import TOP
from kimi_jax.server.app import App, HttpLimits
from kimi_jax.server.loop import EngineLoop, RequestQueue
from kimi_jax.server.metrics import Metrics
from kimi_jax.server.run import listen, serve
from kimi_jax.server.service import Service
from kimi_jax.serving.events import Event, Seen
from kimi_jax.serving.plan import Lane, Request, Shape
from kimi_jax.serving.scheduler import Scheduler

Script = Callable[[Request], Sequence[int]]
SHAPE = Shape(
    groups=1, slots_per_group=4, pages=64, page_tokens=64, tiles=16, lanes=2, chunk=64, depth=2, rounds=(1, 2), ahead=0
)


def logprob_of(position: int) -> float:
    """What the scripted engine says of the token at a position of the answer."""
    return -0.5 * position


class ScriptedQueue:
    """Writes a script's tokens, up to three a round; behind its end it goes on with the last one."""

    def __init__(self, script: Script, seconds: float = 0.0, shape: Shape = SHAPE, fails_at: int | None = None,
        prefix_cache: bool = False,
    ):  # fmt: skip
        self.scheduler = Scheduler(shape, prefix_cache=prefix_cache)
        self.script, self.seconds, self.fails_at = script, seconds, fails_at
        self.steps, self.most_at_once = 0, 0
        self.admitted = lambda admission: None
        self._requests: dict[str, Request] = {}
        self._at: dict[int, tuple[Request, int]] = {}

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self._requests[request.id] = request

    def cancel(self, id: str, reason: str = "cancelled") -> Event | None:
        return self.scheduler.cancel(id, reason)

    def rest(self) -> None:
        pass

    def close(self) -> None:
        for id in [*self.scheduler._works]:
            self.scheduler.cancel(id)

    def step(self) -> list[tuple[Event, Any]]:
        plan = self.scheduler.plan()
        if plan is None:
            return []
        self.steps += 1
        if self.fails_at is not None and self.steps >= self.fails_at:
            raise RuntimeError("the device has gone")
        time.sleep(self.seconds)
        self.most_at_once = max(self.most_at_once, self.scheduler.occupied)
        for admission in plan.admissions:
            self._at[admission.slot] = self._requests[admission.id], admission.emitted
            self.admitted(admission)
        wanted = {lane.slot: 1 for lane in plan.lanes if lane.last}
        wanted |= {slot: plan.rounds * (1 + self.scheduler.shape.depth) for slot in plan.active}
        seen, told = {}, {}
        pieces = {lane.slot: self._scored(lane) for lane in plan.lanes}
        wanted |= dict.fromkeys(pieces.keys() - wanted.keys(), 0)
        for slot, count in wanted.items():
            seen[slot], told[slot] = self._write(slot, count)
            seen[slot] = dataclasses.replace(seen[slot], extra=pieces.get(slot))
        slots = self.scheduler.shape.slots
        snapshot = SimpleNamespace(
            logprobs=np.zeros((slots, 8)), top_ids=np.zeros((slots, 8, TOP), int),
            top_logprobs=np.zeros((slots, 8, TOP)), round_tokens=np.zeros((slots, 3), int), nodes=np.zeros(slots, int),
        )  # fmt: skip
        for slot, (first, tokens) in told.items():
            for index, token in enumerate(tokens):
                snapshot.logprobs[slot, index] = logprob_of(first + index)
                snapshot.top_ids[slot, index] = (token + np.arange(TOP)) % 256
                snapshot.top_ids[slot, index, 0] = token
                snapshot.top_logprobs[slot, index] = logprob_of(first + index) - np.arange(TOP)
        return [(event, snapshot) for event in self.scheduler.observe(plan.number, seen)]

    def _scored(self, lane: Lane) -> Piece | None:
        """What is told of a prompt's tokens: each counts its own position as if it were the answer's."""
        if self._at[lane.slot][0].settings.prompt_logprobs is None:
            return None
        after = np.array([*lane.tokens[1:], *(() if lane.following is None else (lane.following,))])
        logprobs = np.array([logprob_of(lane.start + 1 + index) for index in range(len(after))])
        ids = np.repeat(after[:, None], TOP, 1)
        top = Top(ids, logprobs[:, None] - np.arange(TOP))
        return Piece(lane.start, Scored(logprobs, np.ones(len(after), bool), top))

    def _write(self, slot: int, count: int) -> tuple[Seen, tuple[int, list[int]]]:
        request, emitted = self._at[slot]
        text = [*self.script(request)]
        tokens: list[int] = []
        finished = count > 0 and emitted >= request.limit
        while len(tokens) < count and not finished:
            at = emitted + len(tokens)
            token = text[min(at, len(text) - 1)]
            if token < 0:
                return Seen(tuple(tokens), True, len(request.ids) + at), (emitted, tokens)
            tokens.append(token)
            finished = token in request.settings.stop_ids or emitted + len(tokens) >= request.limit
        self._at[slot] = request, emitted + len(tokens)
        return Seen(tuple(tokens), finished), (emitted, tokens)


STARTING_SECONDS = 600
"""Until a real engine's programs are compiled on a busy machine."""
NOT_FINITE = -1
"""In a script: the logits are not finite here."""


@dataclasses.dataclass
class Running:
    """A server in a thread."""

    app: App
    port: int
    queue: RequestQueue | None = None
    status: int | None = None
    """Once it has ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> "Reply":
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            reply = connection.getresponse()
            return Reply(reply.status, reply.read(), {name.lower(): value for name, value in reply.getheaders()})

    def post(self, path: str, **body: Any) -> "Reply":
        return self.request("POST", path, body)

    def until(self, what: Callable[[], bool], seconds: float = 10) -> None:
        """Waits for something."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.005)


@dataclasses.dataclass
class Reply:
    status: int
    data: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """What a stream's events hold; the last is "[DONE]"."""
        lines = [line.removeprefix("data: ") for line in self.data.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextlib.contextmanager
def running(app: App, drain_seconds: float = 30) -> Iterator[Running]:
    """A server on an app, as `kimi-jax serve` runs it, but for signals."""
    listener = listen("127.0.0.1", 0)
    found = Running(app, listener.getsockname()[1])

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the scripted failure
            found.status = asyncio.run(serve(app, listener, drain_seconds=drain_seconds))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        found.until(lambda: app.loop.ready or app.loop.failure is not None, STARTING_SECONDS)
        found.queue = app.loop.queue
        yield found
    finally:
        app.draining = True
        thread.join(60)
        assert not thread.is_alive()


def scripted_app(
    tokenizer, script: Script, *, seconds: float = 0.0, waiting: int = 64, fails_at: int | None = None,
    limits: HttpLimits | None = None, prefix_cache: bool = False, **how: Any,
) -> App:  # fmt: skip
    """The server's routes on a scripted engine."""
    stop_ids = tuple(tokenizer.special_id(name) for name in ("<|im_end|>", "[EOS]"))
    told = Service("m", tokenizer, stop_ids, tokenizer.vocab_size, SHAPE.capacity, {})
    metrics = Metrics("m")
    open_queue = functools.partial(ScriptedQueue, script, seconds, fails_at=fails_at, prefix_cache=prefix_cache)
    loop = EngineLoop(open_queue, SHAPE.slots + waiting, metrics)
    return App(told, loop, metrics, limits=limits or HttpLimits(), **how)


@contextlib.contextmanager
def scripted(tokenizer, script: Script, *, drain_seconds: float = 30, **how: Any) -> Iterator[Running]:
    """The server on a scripted engine."""
    with running(scripted_app(tokenizer, script, **how), drain_seconds) as server:
        yield server
