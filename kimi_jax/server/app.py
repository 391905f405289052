"""The HTTP side: routes, limits, streams, and clients that go away."""

import asyncio
import dataclasses
import hmac
import importlib.metadata
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kimi_jax.server.answers import ALIVE, DONE, Usage, event
from kimi_jax.server.choices import Delta
from kimi_jax.server.errors import ApiError
from kimi_jax.server.loop import EngineLoop
from kimi_jax.server.mailbox import Mailbox
from kimi_jax.server.metrics import Metrics
from kimi_jax.server.service import Prepared, Service

OPEN = ("/health", "/metrics", "/version")
"""Paths that ask for no key."""


@dataclasses.dataclass(frozen=True)
class HttpLimits:
    """What one client may take."""

    body_bytes: int = 32 << 20
    body_seconds: float = 60
    """From a request's head to the end of its body."""
    silence_seconds: float = 60
    """Without reading, after which a stream's client counts as gone."""
    alive_seconds: float = 10
    """Of silence in a stream, after which a comment says that it lives."""


DEFAULT_HTTP_LIMITS = HttpLimits()


class App:
    """The routes on one engine."""

    def __init__(
        self,
        service: Service,
        loop: EngineLoop,
        metrics: Metrics,
        *,
        limits: HttpLimits = DEFAULT_HTTP_LIMITS,
        api_key: str | None = None,
        log: Callable[[str], None] = lambda line: None,
        log_prompts: bool = False,
    ):
        """Routes for a loop that has been, or will be, started.

        Args:
          api_key: that clients have to send; None serves everybody.
          log: takes a line for each request.
          log_prompts: the lines hold what clients send.
        """
        self.service, self.loop, self.metrics, self.limits = service, loop, metrics, limits
        self.draining = False
        """Whether no new requests are taken."""
        self.answering = 0
        """HTTP requests that are being answered by the engine."""
        self._log, self._log_prompts = log, log_prompts
        self._created = int(time.time())
        posts = {
            "/v1/chat/completions": lambda request: self._generate(request, service.chat),
            "/v1/completions": lambda request: self._generate(request, service.completion),
            "/tokenize": lambda request: self._convert(request, service.tokenize),
            "/detokenize": lambda request: self._convert(request, service.detokenize),
        }
        gets = {
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._models,
            "/tokenizer_info": self._tokenizer_info,
            "/health": self._health,
            "/metrics": self._metrics,
            "/version": self._version,
        }
        routes = [Route(path, _endpoint(call), methods=["POST"]) for path, call in posts.items()]
        routes += [Route(path, _endpoint(call), methods=["GET"]) for path, call in gets.items()]
        handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        self.asgi: ASGIApp = starlette if api_key is None else _with_key(starlette, api_key)

    async def _body(self, request: Request) -> bytes:
        most = self.limits.body_bytes
        data = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for piece in request.stream():
                    data += piece
                    if len(data) > most:
                        raise ApiError(413, f"the body is longer than {most:,} bytes", headers={"Connection": "close"})
        except TimeoutError:
            seconds = self.limits.body_seconds
            late = f"the body has not come within {seconds:g} s"
            raise ApiError(408, late, headers={"Connection": "close"}) from None
        if self._log_prompts:
            self._log(f"{request.url.path}: {bytes(data)!r}")
        return bytes(data)

    async def _convert(self, request: Request, convert: Callable[[bytes], dict[str, Any]]) -> Response:
        return JSONResponse(await asyncio.to_thread(convert, await self._body(request)))

    async def _generate(self, request: Request, prepare: Callable[[bytes], Prepared]) -> Response:
        if self.draining:
            raise ApiError(503, "the server is ending and takes no new requests", headers={"Retry-After": "10"})
        prepared = await asyncio.to_thread(prepare, await self._body(request))
        mailbox = self.loop.submit(prepared.requests)
        self.answering += 1
        answer = _Answer(self, prepared, mailbox)
        if not prepared.stream:
            try:
                return JSONResponse(await _unless_gone(request.receive, answer.whole()))
            finally:
                answer.close()
        return answer

    def finished(self, answer: "_Answer", status: str) -> None:
        """Takes note of an answer that has come to its end."""
        self.answering -= 1
        self._log(
            f"{answer.prepared.form.id}: {status}, {answer.usage.prompt} + {answer.usage.completion} tokens, "
            f"{time.perf_counter() - answer.began:.3f} s"
        )

    async def _models(self, request: Request) -> Response:
        name = request.path_params.get("name")
        self.service.check_model(name)
        model = {
            "id": self.service.model,
            "object": "model",
            "created": self._created,
            "owned_by": "kimi_jax",
            "max_model_len": self.service.capacity,
        }
        return JSONResponse(model if name else {"object": "list", "data": [model]})

    async def _tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(self.service.tokenizer_info())

    async def _health(self, request: Request) -> Response:
        if not self.loop.alive:
            raise ApiError(503, "the engine has failed", code="engine_dead")
        if self.draining or not self.loop.ready:
            raise ApiError(503, "the server is ending" if self.draining else "the server is starting")
        return Response()

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(self.loop), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": importlib.metadata.version("kimi-jax")})


class _Answer(Response):
    """An answer that is on its way; as a response it is a stream."""

    def __init__(self, app: App, prepared: Prepared, mailbox: Mailbox):
        self.app, self.prepared, self.mailbox = app, prepared, mailbox
        self.began = time.perf_counter()
        self.background = None
        self.status = "client gone"
        self._closed = False

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        firsts = self.prepared.requests[:: self.prepared.n]
        prompt, cached = sum(len(each.ids) for each in firsts), self.mailbox.cached
        return Usage(
            prompt,
            sum(choice.tokens for choice in self.prepared.choices),
            sum(cached.get(each.id, 0) for each in firsts),
        )

    def close(self) -> None:
        """Ends what has not ended; whatever happens, this is called."""
        if not self._closed:
            self._closed = True
            self.app.loop.cancel(self.mailbox)
            self.app.finished(self, self.status)

    async def _deltas(self, alive: float | None = None) -> AsyncIterator[list[tuple[int, Delta]]]:
        """What can be told, until all choices have ended; an empty list after so many seconds of silence.

        Raises:
          ApiError: the engine has failed, or the logits of a choice were not finite.
        """
        choices = self.prepared.choices
        while not all(choice.finished for choice in choices):
            news = await self.mailbox.get(alive)
            touched = dict.fromkeys(index for index, _ in news)
            for index, each in news:
                if each.refusal is not None:
                    raise ApiError(400, each.refusal)
                choices[index].take(each)
            for index in touched:
                if choices[index].failed >= 0:
                    raise ApiError(
                        500, f"the logits are not finite behind position {choices[index].failed}: check the checkpoint "
                        "and the kernels in use", code="non_finite_logits",
                    )  # fmt: skip
            ended = [self.prepared.requests[index].id for index in touched if choices[index].finished]
            self.app.loop.cancel(self.mailbox, ended)
            deltas = [(index, delta) for index in touched if (delta := choices[index].delta()) is not None]
            if deltas or not news:
                yield deltas

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        totals = [Delta() for _ in self.prepared.choices]
        try:
            async for deltas in self._deltas():
                for index, delta in deltas:
                    totals[index].add(delta)
        except ApiError as error:
            self.status = f"error {error.status}"
            raise
        form, told = self.prepared.form, zip(self.prepared.choices, totals, self.prepared.echoes, strict=True)
        self.status = "answered"
        return form.whole([form.answer(*each) for each in told], self.usage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._stream(send))
        except ApiError as error:  # before anything was sent
            await _error_response(error)(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self.close()

    async def _stream(self, send: Send) -> None:
        started = False
        opened: set[int] = set()

        async def out(data: bytes | bytearray, more: bool = True) -> None:
            nonlocal started
            try:
                async with asyncio.timeout(self.app.limits.silence_seconds):
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    await send({"type": "http.response.body", "body": bytes(data), "more_body": more})
            except TimeoutError:
                raise ClientDisconnect from None

        form = self.prepared.form
        try:
            async for deltas in self._deltas(self.app.limits.alive_seconds):
                data = bytearray() if deltas else bytearray(ALIVE)
                for index, delta in deltas:
                    echo = None if index in opened else self.prepared.echoes[index]
                    opening = None if index in opened else form.opening(index)
                    opened.add(index)
                    if opening is not None:
                        data += event(form.chunk(opening))
                    for each in _split(delta):
                        data += event(form.chunk(form.piece(self.prepared.choices[index], each, echo)))
                        echo = None
                await out(data)
        except ApiError as error:
            self.status = f"error {error.status}"
            if not started:
                raise
            await out(event(error.body), more=False)
            return
        last = event(form.usage(self.usage)) if self.prepared.include_usage else b""
        self.status = "answered"
        await out(last + DONE, more=False)


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def _split(delta: Delta) -> list[Delta]:
    """A delta as chunks have it: thinking, text, pieces of calls, and the end, each in a chunk of its own.

    Ids and log-probabilities go with the first.
    """
    parts = [Delta(reasoning=delta.reasoning)] if delta.reasoning else []
    parts += [Delta(content=delta.content)] if delta.content else []
    parts += [Delta(calls=[call]) for call in delta.calls]
    if delta.finish_reason:
        parts.append(Delta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason))
    parts[0].ids, parts[0].told = delta.ids, delta.told
    return parts


async def _unless_gone[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client has closed its connection.

    Raises:
      ClientDisconnect: it has.
    """

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    running, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        return running.result()
    finally:
        for task in (running, gone):
            task.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


def _endpoint(call: Callable[[Request], Coroutine[Any, Any, Response]]) -> Any:
    async def endpoint(request: Request) -> Response:
        try:
            return await call(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    return endpoint


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _api_error(request: Request, error: ApiError) -> Response:
    return _error_response(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    what = {404: f"there is no path {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    told = ApiError(error.status_code, what.get(error.status_code, str(error.detail)), headers=error.headers)
    return _error_response(told)


async def _unexpected(request: Request, error: Exception) -> Response:
    traceback.print_exception(error, file=sys.stderr)
    return _error_response(ApiError(500, f"the server has failed with this request: {type(error).__name__}"))


def _with_key(app: ASGIApp, key: str) -> ASGIApp:
    """Asks for a key, and takes no longer for one that is nearly right."""
    wanted = f"Bearer {key}".encode()

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, wanted):
                told = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                headers = {"WWW-Authenticate": "Bearer"}
                await _error_response(ApiError(401, told, code="invalid_api_key", headers=headers))(
                    scope, receive, send
                )
                return
        await app(scope, receive, send)

    return checked
