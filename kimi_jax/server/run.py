"""The server's life: it listens, becomes ready, answers, drains and ends."""

import asyncio
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn

from kimi_jax.server.app import App
from kimi_jax.server.loop import EngineLoop

FAILED = 1
KILLED = 128 + signal.SIGTERM
"""Exit statuses after the engine's failure, and after a second signal while requests were under way."""
AFTER_ERROR_SECONDS = 1
"""From the engine's failure to the end: time to tell the clients."""
DRAIN_POLL_SECONDS = 0.05
BACKLOG = 2048
"""Connections that wait to be accepted."""


class Server(uvicorn.Server):
    """Drains at the first signal and ends at the second."""

    def __init__(self, app: App, drain_seconds: float, **config: Any):
        super().__init__(uvicorn.Config(app.asgi, lifespan="off", log_config=None, access_log=False, **config))
        self.app, self.status = app, 0
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to end."""
        if self.app.draining:
            self.status = KILLED if self.app.answering else 0
            self.should_exit = self.force_exit = True
        self.app.draining = True

    async def watch(self, loop: EngineLoop) -> None:
        """Ends the server once it has drained, or when the engine has failed."""
        waited = 0.0
        while not self.should_exit:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
            if loop.failure is not None:
                self.status = FAILED
                await asyncio.sleep(AFTER_ERROR_SECONDS)
                break
            if self.app.draining:
                waited += DRAIN_POLL_SECONDS
                if not self.app.answering:
                    break
                if waited > self._drain_seconds:
                    self.status = KILLED
                    self.force_exit = True
                    break
        self.should_exit = True


async def serve(app: App, listener: socket.socket, *, drain_seconds: float = 600) -> int:
    """Serves on a socket that listens until a signal ends it; the exit status.

    Args:
      drain_seconds: that requests under way may take after the first signal.

    Raises:
      BaseException: what has ended the engine's thread.
    """
    server = Server(app, drain_seconds, timeout_graceful_shutdown=2, http="h11")
    app.loop.start()
    watching = asyncio.create_task(server.watch(app.loop))
    try:
        await server.serve(sockets=[listener])
    finally:
        watching.cancel()
        await app.loop.stop()
    if app.loop.failure is not None:
        raise app.loop.failure
    return server.status


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, bound before the engine is opened so that a port in use is found at once.

    Raises:
      OSError: naming the address that is in use or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port") from None
    listener.listen(BACKLOG)
    return listener
