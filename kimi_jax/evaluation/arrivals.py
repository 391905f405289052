"""Requests that come by the clock, to an engine in this process or to a server over HTTP, and what they felt."""

import asyncio
import dataclasses
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kimi_jax.serving.arrivals import arrival_times
from kimi_jax.text_files import read_text

TOKEN_IDS = 256
"""Prompts are made of this many ids: those of single bytes, which every tokenizer has."""


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request and when it comes."""

    at: float
    """Seconds after the first."""
    ids: tuple[int, ...]
    limit: int
    """Tokens of its answer, which has no end of its own."""


def poisson(rate: float, prompts: Sequence[int], limits: Sequence[int], seed: int = 0) -> list[Arrival]:
    """Requests of given lengths that come independently of each other.

    Args:
      rate: requests a second on average; infinity lets all come at once.
      prompts, limits: tokens of each prompt and of each answer.
    """
    random = np.random.default_rng(seed)
    times = arrival_times(len(prompts), rate, random)
    ids = [tuple(random.integers(0, TOKEN_IDS, count).tolist()) for count in prompts]
    return [Arrival(*each) for each in zip(times, ids, limits, strict=True)]


def read_trace(path: Path, seed: int = 0) -> list[Arrival]:
    """Requests of a file: one a line, `{"at": seconds, "prompt_tokens": n, "max_tokens": n, "session": name}`.

    A session's prompt is its last one, as many tokens as its last answer had, and so many new tokens: the contexts of
    coding agents grow like that. Without a session a prompt stands for itself.

    Raises:
      ValueError: naming the line and what is wrong with it.
    """
    random = np.random.default_rng(seed)
    contexts: dict[Any, tuple[int, ...]] = {}
    arrivals = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at, new, limit = float(row["at"]), int(row["prompt_tokens"]), int(row["max_tokens"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f'{path}:{number}: expected {{"at": 0.5, "prompt_tokens": 20, "max_tokens": 10}}'
            ) from None
        if at < 0 or new < 1 or limit < 1:
            raise ValueError(f"{path}:{number}: times are not negative, and tokens are positive")
        session = row.get("session")
        ids = (*contexts.get(session, ()), *random.integers(0, TOKEN_IDS, new).tolist())
        if session is not None:
            contexts[session] = (*ids, *random.integers(0, TOKEN_IDS, limit).tolist())
        arrivals.append(Arrival(at, ids, limit))
    if not arrivals:
        raise ValueError(f"{path}: there is no request in it")
    return sorted(arrivals, key=lambda arrival: arrival.at)


@dataclasses.dataclass
class Felt:
    """What one request's client has seen, in seconds."""

    sent: float
    came: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """When tokens came, and how many."""

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return sum(count for _, count in self.came)

    @property
    def first(self) -> float:
        """From the request to its first token."""
        return self.came[0][0] - self.sent

    @property
    def between(self) -> float:
        """Between tokens, on average over those behind the first."""
        later = self.tokens - self.came[0][1]
        return (self.came[-1][0] - self.came[0][0]) / later if later else 0.0


class Target(Protocol):
    """Where requests go."""

    async def send(self, arrival: Arrival) -> Felt:
        """Has one request answered."""
        ...

    async def figures(self) -> dict[str, float]:
        """Sums of the server's figures by name."""
        ...


async def replay(
    target: Target,
    arrivals: Sequence[Arrival],
    clients: int | None = None,
    progress: Callable[[int], None] = lambda n: None,
) -> tuple[list[Felt], float]:
    """Sends requests at their times, and tells what each has felt, and the seconds from the first to the last token.

    Args:
      clients: requests that are under way at most; those behind wait, and their time begins when they are sent.
      progress: told of the tokens of every answer.
    """
    begun = time.perf_counter()
    gate = asyncio.Semaphore(clients or len(arrivals))

    async def one(arrival: Arrival) -> Felt:
        await asyncio.sleep(max(0, begun + arrival.at - time.perf_counter()))
        async with gate:
            felt = await target.send(arrival)
        progress(felt.tokens)
        return felt

    felt = await asyncio.gather(*map(one, arrivals))
    return felt, max(each.came[-1][0] for each in felt) - begun


def sums(text: str) -> dict[str, float]:
    """Figures of a Prometheus page by name, added up over their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                name = sample.name.removeprefix("vllm:")
                found[name] = found.get(name, 0) + sample.value
    return found


class OverHttp:
    """A server of this project, by its address."""

    def __init__(self, url: str):
        """A server at http://HOST:PORT.

        Raises:
          ValueError: an address of another form.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"--url is {url!r}; it is http://HOST:PORT")
        self._url, self._host, self._port = url.rstrip("/"), parts.hostname, parts.port or 80

    async def send(self, arrival: Arrival) -> Felt:
        body = {
            "prompt": arrival.ids, "max_tokens": arrival.limit, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        felt = Felt(time.perf_counter())
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        try:
            writer.write(head.encode() + data)
            status = await reader.readline()
            async for line in reader:
                if line.startswith(b"data: {") and (choices := json.loads(line[6:])["choices"]):
                    felt.came.append((time.perf_counter(), len(choices[0]["token_ids"])))
        finally:
            writer.close()
        if felt.tokens != arrival.limit:
            raise ValueError(f"the server gave {felt.tokens} of {arrival.limit} tokens ({status.decode().strip()})")
        return felt

    async def figures(self) -> dict[str, float]:
        def page() -> str:
            with urllib.request.urlopen(f"{self._url}/metrics") as reply:
                return reply.read().decode()

        return sums(await asyncio.to_thread(page))


class InProcess:
    """The engine's thread of a server in this process, without HTTP."""

    def __init__(self, app: Any):
        """An `server.app.App` whose loop has been started."""
        from kimi_jax.serving.plan import Request, Settings

        self._app, self._request, self._settings, self._sent = app, Request, Settings(), 0

    async def send(self, arrival: Arrival) -> Felt:
        self._sent += 1
        felt = Felt(time.perf_counter())
        mailbox = self._app.loop.submit([self._request(f"{self._sent}", arrival.ids, arrival.limit, self._settings)])
        while felt.tokens < arrival.limit:
            count = sum(len(news.event.tokens) for _, news in await mailbox.get())
            if count:
                felt.came.append((time.perf_counter(), count))
        return felt

    async def figures(self) -> dict[str, float]:
        return sums(self._app.metrics.text(self._app.loop).decode())


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a request is to feel to count as good, in seconds."""

    first: float = 1.0
    between: float = 0.05


def summary(
    way: str, felt: Sequence[Felt], seconds: float, before: dict[str, float], after: dict[str, float], goal: Goal
) -> dict[str, Any]:
    """One line of the table: what all requests have felt, and what the server counted meanwhile."""

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def share(part: str, whole: str) -> float | None:
        return counted(part) / counted(whole) if counted(whole) else None

    firsts, betweens = ([getattr(each, name) for each in felt] for name in ("first", "between"))
    good = sum(each.first <= goal.first and each.between <= goal.between for each in felt)
    queued = share("request_queue_time_seconds_sum", "request_queue_time_seconds_count")
    accepted = share("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")
    found = {
        "way": way,
        "tokens_per_second": sum(each.tokens for each in felt) / seconds,
        "first_token_ms_median": 1e3 * float(np.median(firsts)),
        "first_token_ms_p99": 1e3 * float(np.quantile(firsts, 0.99)),
        "between_tokens_ms_median": 1e3 * float(np.median(betweens)),
        "between_tokens_ms_p99": 1e3 * float(np.quantile(betweens, 0.99)),
        "queue_ms_mean": None if queued is None else 1e3 * queued,
        "tokens_a_round": None if accepted is None else 1 + accepted,
        "prompt_tokens_cached": share("prefix_cache_hits_total", "prefix_cache_queries_total"),
        "good_requests_per_second": good / seconds,
    }  # fmt: skip
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


COLUMNS = {
    "way": "way",
    "tokens_per_second": "tokens/s",
    "first_token_ms_median": "first ms",
    "first_token_ms_p99": "p99",
    "between_tokens_ms_median": "next ms",
    "between_tokens_ms_p99": "p99 ",
    "queue_ms_mean": "queue",
    "tokens_a_round": "round",
    "prompt_tokens_cached": "cached",
    "good_requests_per_second": "good/s",
}
"""Figures of a summary, and how a table calls them."""
