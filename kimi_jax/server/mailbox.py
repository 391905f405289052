"""What the engine's thread tells a handler of its requests, and how the handler waits for it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

from kimi_jax.serving.events import Event
from kimi_jax.serving.plan import Request


@dataclasses.dataclass(frozen=True)
class Told:
    """A token's log-probability, and the most likely tokens beside it."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()
    """Ids and natural logarithms, most likely first."""


@dataclasses.dataclass(frozen=True)
class News:
    """What a dispatch has brought to a request."""

    event: Event
    told: Sequence[Told] | None = None
    """One for each of the event's tokens, where log-probabilities were asked for."""
    prompt: Sequence[Told] = ()
    """Of the prompt's next tokens, from its second on, where they were asked for."""
    refusal: str | None = None
    """Why the queue has not taken the request."""


class Mailbox:
    """News of the requests of one HTTP request. All of it runs on the event loop."""

    def __init__(self, requests: Sequence[Request]):
        self.requests = {request.id: request for request in requests}
        self.open = {id: index for index, id in enumerate(self.requests)}
        """Requests that have not ended, with their numbers."""
        self.cached: dict[str, int] = {}
        """Tokens of each request's prompt that were in the cache when it got its slot."""
        self.failure: Exception | None = None
        """Why nothing more will come."""
        self._news: list[tuple[int, News]] = []
        self._arrived = asyncio.Event()

    def put(self, news: News) -> None:
        """Takes what has come; nothing for a request that was ended here."""
        index = self.open.get(news.event.id)
        if index is None:
            return
        if news.event.reason is not None:
            del self.open[news.event.id]
        self._news.append((index, news))
        self._arrived.set()

    def fail(self, failure: Exception) -> None:
        """Says that nothing more will come."""
        self.failure = failure
        self._arrived.set()

    async def get(self, seconds: float | None = None) -> list[tuple[int, News]]:
        """All that has come, by number of the request, as soon as there is something; nothing after so many seconds.

        Raises:
          Exception: what `fail` was told, once all news are read.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._arrived.wait()
        self._arrived.clear()
        news, self._news = self._news, []
        if self.failure is not None and not news:
            raise self.failure
        if self.failure is not None:
            self._arrived.set()
        return news
