"""Plans reach every process whole and in order, and a process that goes away is named."""

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimi_jax.serving.plan import Lane, Plan
from kimi_jax.serving.transport import ANNOUNCED_BYTES, Receiver, Sender, TransportError, connect

PLANS = [Plan(number, lanes=(Lane(0, 0, tuple(range(10 * number, 40 * number)), False),)) for number in range(60)]


def announced(sender: Sender) -> tuple[bytes, int]:
    announcement = sender.announcement
    assert len(announcement) == ANNOUNCED_BYTES
    return announcement, struct.unpack("!H", announcement[:2])[0]


def pair() -> tuple[Sender, Receiver]:
    sender = Sender(2)
    receiver = Receiver("localhost", sender.announcement, 1, 5)
    sender.accept(5)
    return sender, receiver


def test_plans_arrive_whole_and_in_order():
    boards = [queue.Queue[bytes]() for _ in range(3)]
    received: dict[int, list[Plan | str]] = {}

    def announce(index: int, value: bytes) -> bytes:
        if not index:
            for board in boards[1:]:
                board.put(value)
            return value
        return boards[index].get(timeout=5)

    def run(index: int) -> None:
        side = connect(index, 3, "localhost", lambda value: announce(index, value), 5)
        if isinstance(side, Sender):
            for plan in PLANS:
                side.send(plan.to_json())
                side.send("")
            side.close()
            return
        received[index] = []
        while (text := side.receive(5)) is not None:
            received[index].append(Plan.from_json(text) if text else "")
        side.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = [message for plan in PLANS for message in (plan, "")]
    assert received == {1: expected, 2: expected}


def test_a_large_plan_arrives():
    sender, receiver = pair()
    plan = Plan(0, lanes=(Lane(0, 0, tuple(range(500_000)), True),))
    thread = threading.Thread(target=sender.send, args=(plan.to_json(),))
    thread.start()
    assert Plan.from_json(receiver.receive(5) or "") == plan
    thread.join(5)


def test_those_that_do_not_connect_are_named():
    sender = Sender(4)
    Receiver("localhost", sender.announcement, 2, 5)
    with pytest.raises(
        TransportError, match=r"process 1, 3 of 4 did not connect to process 0 within 0.2 s: is TCP port"
    ):
        sender.accept(0.2)


def test_strangers_are_not_taken_for_a_process():
    sender = Sender(2)
    announcement, port = announced(sender)
    silent = socket.create_connection(("localhost", port))
    silent.close()
    stranger = socket.create_connection(("localhost", port))
    stranger.sendall(bytes(16) + struct.pack("!I", 1))
    receiver = Receiver("localhost", announcement, 1, 5)
    sender.accept(5)
    sender.send("plan")
    assert receiver.receive(5) == "plan"
    stranger.settimeout(5)
    assert stranger.recv(1) == b""


def test_a_process_that_left_is_named():
    sender = Sender(3)
    receivers = [Receiver("localhost", sender.announcement, index, 5) for index in (1, 2)]
    sender.accept(5)
    receivers[1].close()
    time.sleep(0.05)
    with pytest.raises(TransportError, match="process 2 of 3 went away"):
        sender.send("plan")
    assert receivers[0].receive(5) == "plan"
    sender.close()
    assert receivers[0].receive(5) is None


def test_process_0_is_missed():
    sender, receiver = pair()
    with pytest.raises(TransportError, match=r"process 0 has sent nothing for 0.1 s"):
        receiver.receive(0.1)
    sender._peers[1].close()  # as the end of its process would
    with pytest.raises(TransportError, match="process 0 went away"):
        receiver.receive(5)
    sender._server.close()
    with pytest.raises(TransportError, match=r"process 1 cannot reach process 0 at localhost:\d+ "):
        Receiver("localhost", sender_announcement_of_nobody(), 1, 1)


def sender_announcement_of_nobody() -> bytes:
    nobody = socket.create_server(("localhost", 0))
    port = nobody.getsockname()[1]
    nobody.close()
    return struct.pack("!H", port) + bytes(16)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_is_noticed(killed):
    """Real processes: the one that is left says who is gone."""
    program = (
        "import sys, time\n"
        "from kimi_jax.serving.transport import *\n"
        "index = int(sys.argv[1])\n"
        "def announce(value):\n"
        "    if index: return bytes.fromhex(sys.stdin.readline())\n"
        "    print(value.hex(), flush=True)\n"
        "try:\n"
        "    side = connect(index, 2, 'localhost', announce, 10)\n"
        "    print('connected', flush=True)\n"
        "    while True:\n"
        "        side.receive(10) if index else side.send('plan')\n"
        "        time.sleep(0.01)\n"
        "except TransportError as error:\n"
        "    sys.exit(str(error))\n"
    )
    root = Path(__file__).parents[2]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(index)], cwd=root, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    assert both[0].stdout
    assert both[1].stdin
    both[1].stdin.write(both[0].stdout.readline())
    both[1].stdin.flush()
    for child in both:
        assert child.stdout
        assert child.stdout.readline() == "connected\n"
    os.kill(both[killed].pid, signal.SIGKILL)
    _, said = both[1 - killed].communicate(timeout=20)
    both[killed].communicate()
    assert said.strip() == ("process 0 went away" if killed == 0 else "process 1 of 2 went away")
