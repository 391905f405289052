"""One choice of an answer as its tokens come: what may be told of it now, the same in a stream and as a whole."""

import dataclasses
from collections.abc import Sequence

from kimi_jax.chat import CallPiece, ToolCall
from kimi_jax.server.mailbox import News, Told
from kimi_jax.text_output import Reader


@dataclasses.dataclass
class Delta:
    """What has come of a choice since the last time, or altogether."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    told: list[Told] = dataclasses.field(default_factory=list)
    """One for each id, where log-probabilities were asked for."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or token of the client's that has ended the text."""

    def add(self, other: "Delta") -> None:
        """Appends what came later."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.ids += other.ids
        self.told += other.told
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.finish_reason)


class Choice:
    """Follows one request's tokens."""

    def __init__(self, index: int, reader: Reader, own_stop_ids: Sequence[int] = (), calls: bool = True):
        """A choice without tokens.

        Args:
          index: of the choice in its answer.
          own_stop_ids: stop tokens that are the client's and not the model's.
          calls: tool calls are told as such; otherwise they are content, as the model wrote them.
        """
        self.index, self.reader = index, reader
        self.failed = -1
        """Position whose logits were not finite, or -1."""
        self._own_stop_ids, self._calls = frozenset(own_stop_ids), calls
        self.prompt_told: list[Told | None] = [None]
        """Of the prompt's tokens, where they were asked for; nothing is told of the first."""
        self._told: list[Told] = []
        self._sent = 0
        self._numbers: dict[int, int] = {}
        """Calls that are told, by their number among all that the model wrote."""

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.reader.finished

    @property
    def tokens(self) -> int:
        """Tokens of the text so far."""
        return len(self.reader.ids)

    def take(self, news: News) -> None:
        """Takes what a dispatch has brought."""
        event = news.event
        self._told += news.told or ()
        self.prompt_told += news.prompt
        if event.reason == "error":
            self.failed = event.failed
        self.reader.push(event.tokens, event.reason is not None)

    def delta(self) -> Delta | None:
        """What can be told now, and was not before; None where that is nothing."""
        reader, delta = self.reader, Delta()
        for piece in reader.pending:
            if piece.part == "thinking":
                delta.reasoning += piece.text
            else:
                delta.content += piece.text
        reader.pending.clear()
        for piece in reader.call_pieces:
            if piece.id and piece.name and self._calls:
                self._numbers[piece.index] = len(self._numbers)
            if piece.index in self._numbers:
                delta.calls.append(dataclasses.replace(piece, index=self._numbers[piece.index]))
        reader.call_pieces.clear()
        if reader.finished:
            calls = enumerate(reader.response.tool_calls)
            delta.content += "".join(_as_written(call) for index, call in calls if index not in self._numbers)
            delta.finish_reason = self._finish_reason
            own = isinstance(reader.stop, str) or reader.stop in self._own_stop_ids
            delta.stop_reason = reader.stop if own else None
        if not delta:
            return None
        delta.ids = reader.ids[self._sent : reader.settled]
        delta.told = self._told[self._sent : reader.settled]
        self._sent = reader.settled
        return delta

    @property
    def _finish_reason(self) -> str:
        reason = "error" if self.failed >= 0 else self.reader.finish_reason
        return "tool_calls" if reason == "stop" and self._numbers else reason


def _as_written(call: ToolCall) -> str:
    """A call that names no function, which no client could make, as the text that it is."""
    arguments = f"<|tool_call_argument_begin|>{call.arguments}" if call.arguments else ""
    return f"<|tool_call_begin|>{call.id}{arguments}<|tool_call_end|>"


def merged(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    """Whole calls of their pieces."""
    calls: dict[int, CallPiece] = {}
    for piece in pieces:
        begun = calls.get(piece.index)
        calls[piece.index] = (
            piece if begun is None else dataclasses.replace(begun, arguments=begun.arguments + piece.arguments)
        )
    return [*calls.values()]
