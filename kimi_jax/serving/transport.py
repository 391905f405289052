"""Plans on their way from process 0 to the others: a TCP connection to each, beside the coordinator's.

No collective of the devices, since that would wait for the dispatch that runs. A message is four bytes of length, most
significant first, and so much UTF-8 text, usually a plan's JSON. An empty message says that process 0 lives, and END
that it has come to its end. Plans go one way only; a connection that closes tells each side that the other is gone.
"""

import contextlib
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable

END = b"null"
_LENGTH, _HELLO = struct.Struct("!I"), struct.Struct("!16sI")
_ANNOUNCED = struct.Struct("!H16s")
ANNOUNCED_BYTES = _ANNOUNCED.size
"""Length of what process 0 announces: its port, and a secret by which it knows the others."""


class TransportError(RuntimeError):
    """Another process of the program went away or does not appear."""


class Sender:
    """Process 0's side. It listens, on a port that is free, as soon as it exists."""

    def __init__(self, processes: int, host: str = ""):
        """`host`: address to listen at; every address of this machine by default."""
        self._processes, self._secret = processes, secrets.token_bytes(16)
        self._peers: dict[int, socket.socket] = {}
        if host or not socket.has_dualstack_ipv6():
            self._server = socket.create_server((host, 0), backlog=processes)
        else:
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=processes, dualstack_ipv6=True)

    @property
    def announcement(self) -> bytes:
        """What the others need in order to connect, of ANNOUNCED_BYTES."""
        return _ANNOUNCED.pack(self._server.getsockname()[1], self._secret)

    def accept(self, seconds: float) -> None:
        """Waits for all others.

        Raises:
          TransportError: after so many seconds, naming those that are missing.
        """
        deadline = time.monotonic() + seconds
        while len(self._peers) < self._processes - 1:
            self._server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                missing = ", ".join(str(index) for index in range(1, self._processes) if index not in self._peers)
                port = self._server.getsockname()[1]
                raise TransportError(
                    f"process {missing} of {self._processes} did not connect to process 0 within {seconds:g} s: is TCP "
                    f"port {port} of its host open to the others?"
                ) from None
            connection.settimeout(5)
            try:
                secret, index = _HELLO.unpack(_exactly(connection, _HELLO.size))
            except OSError:
                connection.close()
                continue
            if not secrets.compare_digest(secret, self._secret):  # somebody else's
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            self._peers[index] = connection
        self._server.close()

    def send(self, text: str) -> None:
        """Sends a message to all others; an empty one says that this process lives.

        Raises:
          TransportError: one of them is gone; it is named.
        """
        self._send(text.encode())

    def _send(self, data: bytes) -> None:
        for index, peer in self._peers.items():
            try:
                # Nobody writes to process 0: what can be read is a connection's end.
                if select.select([peer], [], [], 0)[0] and not peer.recv(1):
                    raise ConnectionResetError
                peer.sendall(_LENGTH.pack(len(data)) + data)
            except OSError as error:
                raise TransportError(f"process {index} of {self._processes} went away") from error

    def close(self) -> None:
        """Tells the others that no plan follows."""
        with contextlib.suppress(TransportError):
            self._send(END)
        for connection in (self._server, *self._peers.values()):
            connection.close()


class Receiver:
    """Another process's side."""

    def __init__(self, host: str, announcement: bytes, index: int, seconds: float):
        """Connects to process 0.

        Args:
          host: where process 0 runs.
          announcement: of its `Sender`.
          index: of this process, from 1.

        Raises:
          TransportError: it cannot be reached within so many seconds.
        """
        port, secret = _ANNOUNCED.unpack(announcement)
        try:
            self._connection = socket.create_connection((host.strip("[]"), port), timeout=seconds)
        except OSError as error:
            raise TransportError(
                f"process {index} cannot reach process 0 at {host}:{port} ({error}): is the port open "
                "between their hosts?"
            ) from error
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(_HELLO.pack(secret, index))

    def receive(self, seconds: float | None = None) -> str | None:
        """The next message: a plan, "" where process 0 only says that it lives, None at the end.

        Args:
          seconds: of silence that are taken for process 0's death; None waits for as long as it takes.

        Raises:
          TransportError: process 0 went away or was silent for too long.
        """
        self._connection.settimeout(seconds)
        try:
            (length,) = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size))
            data = _exactly(self._connection, length)
        except TimeoutError:
            raise TransportError(f"process 0 has sent nothing for {seconds:g} s") from None
        except OSError as error:
            raise TransportError("process 0 went away") from error
        return None if data == END else data.decode()

    def close(self) -> None:
        """Leaves; process 0 notices when it sends its next message."""
        self._connection.close()


def connect(
    index: int, processes: int, host: str, announce: Callable[[bytes], bytes], seconds: float = 60
) -> Sender | Receiver:
    """This process's side of the connections between all processes, once they stand.

    Args:
      index: of this process.
      host: where process 0 runs, as the others reach it.
      announce: gives every process what process 0 gives to it, ANNOUNCED_BYTES long; all processes call it once.

    Raises:
      TransportError: not all processes are connected within so many seconds.
    """
    if index:
        return Receiver(host, announce(bytes(ANNOUNCED_BYTES)), index, seconds)
    sender = Sender(processes)
    announce(sender.announcement)
    sender.accept(seconds)
    return sender


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes.

    Raises:
      ConnectionResetError: where the connection ends before.
    """
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return bytes(data)
