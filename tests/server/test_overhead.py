"""What a streamed chunk costs the server's processor, whatever the engine takes."""

import threading
import time

import pytest

from kimi_jax.commands.benchmark_serve import ServeOptions, from_another_process
from kimi_jax.evaluation.arrivals import poisson
from kimi_jax.server import app
from tests.server.scripted import scripted

MOST_MS = 1.0
"""Of a chunk, the engine's thread included."""


@pytest.mark.slow
def test_a_chunk_takes_less_than_a_millisecond(tokenizer, monkeypatch):
    """32 clients in a process of their own; three tokens a chunk, as a short tree gives."""
    chunks = []
    event = app.event
    monkeypatch.setattr(app, "event", lambda data: chunks.append(1) or event(data))
    with scripted(tokenizer, lambda request: [65], seconds=0.002, waiting=512) as server:
        arrivals = poisson(float("inf"), [20] * 96, [90] * 96)
        before = spent()
        from_another_process(server.url, arrivals, ServeOptions(clients=32, slots=4))
        used = spent() - before
    assert len(chunks) > 1000
    each = 1e3 * used / len(chunks)
    print(f"{len(chunks)} chunks, {each:.2f} ms of processor time a chunk")
    assert each < MOST_MS


def spent() -> float:
    """Processor seconds of this process's threads but for the one that measures, which only waits."""
    assert threading.current_thread() is threading.main_thread()
    return time.process_time() - time.thread_time()
