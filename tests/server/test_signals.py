"""Signals to a server in a process of its own."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = """
import asyncio, sys
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.server.run import listen, serve
from kimi_jax.tokenizer import Tokenizer
from tests.server.scripted import scripted_app

app = scripted_app(Tokenizer.from_directory(BUNDLED_CHECKPOINT), lambda request: [65], seconds=0.02)
listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
sys.exit(asyncio.run(serve(app, listener)))
"""


def ask(port, tokens):
    """A stream that has begun."""
    body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True}).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    assert b" 200 " in connection.recv(100)
    return connection


def rest(connection):
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
        if b"[DONE]" in data:
            break
    return data


@pytest.mark.slow
@pytest.mark.parametrize("signals", [0, 1, 2])
def test_one_signal_drains_and_a_second_ends(signals):
    """None before the signal that ends an idle server."""
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        connection = None
        if signals:
            connection = ask(port, 200 if signals == 1 else 900)
        else:
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
        if connection is not None:
            assert (b"[DONE]" in rest(connection)) == (signals == 1)
        assert process.wait(20) == (143 if signals == 2 else 0)
