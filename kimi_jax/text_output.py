"""Generated ids as they arrive, to text that is shown: exact into pipes and files, harmless on a terminal."""

import bisect
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.segment import Segment, Segments
from rich.style import Style

from kimi_jax.chat import CallPiece, Piece, Response, ResponseStream
from kimi_jax.prompts import Prompt
from kimi_jax.standard_output import OutputConsole, harmless
from kimi_jax.tokenizer import Tokenizer

_ESCAPED = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def as_json(value: Any) -> str:
    """JSON in one line, with what is no UTF-8 text, acts on a terminal or may be taken for a line end escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class StopStrings:
    """Finds the first of some strings in a text that arrives in pieces, wherever the pieces are cut.

    First is the one that begins first in the whole text. What may yet be the beginning of one is held back.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self.found: str | None = None
        """The one that was found; the text then ends before it."""
        self.passed = 0
        """Characters of the text that can be shown so far."""
        self._stops = tuple(stops)
        self._held = ""

    @property
    def ended(self) -> bool:
        """Whether one was found."""
        return self.found is not None

    @property
    def end(self) -> int:
        """Characters of the text up to the end of the string that was found, or of all that can be shown."""
        return self.passed + len(self.found or "")

    def push(self, text: str) -> str:
        """What can be shown now. After the end, nothing."""
        if self.ended:
            return ""
        if not self._stops:
            return self._pass(text)
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        open_at = next((at for at in range(len(self._held)) if self._may_begin(at)), len(self._held))
        if found and min(found) <= open_at:
            return self._end(min(found))
        shown, self._held = self._held[:open_at], self._held[open_at:]
        return self._pass(shown)

    def flush(self) -> str:
        """The end of the text: what was held back, up to a stop string in it."""
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            return self._end(min(found))
        shown, self._held = self._held, ""
        return self._pass(shown)

    def _may_begin(self, at: int) -> bool:
        rest = self._held[at:]
        return any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops)

    def _end(self, at: int) -> str:
        self.found = min((stop for stop in self._stops if self._held.startswith(stop, at)), key=len)
        shown, self._held = self._held[:at], ""
        return self._pass(shown)

    def _pass(self, shown: str) -> str:
        self.passed += len(shown)
        return shown


class Reader:
    """Follows one prompt's tokens and keeps what has not been shown yet."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        *,
        raw: bool,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        stops: Sequence[str] = (),
        silent_ids: Sequence[int] = (),
        skip_special: bool = False,
    ):
        """Starts a text.

        Args:
          tokenizer: the checkpoint's.
          stop_ids: ids that end a text.
          raw: the ids are text, not a chat's response.
          thinking: the prompt left the thinking open.
          tools: those declared to the model.
          stops: strings that end the answer; the first one and what follows are no part of it. Thinking may hold them.
          silent_ids: ids that are no text and end none, such as stop tokens of a text that is to go on behind them.
          skip_special: raw text is shown without control tokens.
        """
        self.ids: list[int] = []
        """Ids of the text; the last is a stop token, or the one that completed a stop string, where there is one."""
        self.finished = False
        self.pending: list[Piece] = []
        self.response = Response("", "")
        """Once the text has ended."""
        self._stop_ids = frozenset(stop_ids)
        self._no_text = self._stop_ids | frozenset(silent_ids)
        self._stream = None if raw else ResponseStream(tokenizer, thinking, tools)
        self._decoder = tokenizer.decoder(skip_special=skip_special)
        self._one_by_one = bool(stops)
        self._stops = StopStrings(stops)
        self._searched = 0
        """Characters of the answer that were searched for stop strings."""
        self._ends: list[int] = []
        """That number after each token, where there are stop strings."""
        self._answer = ""

    def push(self, ids: Sequence[int], finished: bool) -> list[int]:
        """Takes the tokens of one dispatch, and gives those that belong to the text."""
        before = len(self.ids)
        for part in [[token] for token in ids] if self._one_by_one else [list(ids)]:
            if self.finished:
                break
            self.ids += part
            text = [token for token in part if token not in self._no_text]
            self._take(self._stream.push(text) if self._stream else self._raw(self._decoder.push(text)))
            if self._one_by_one:
                self._ends.append(self._searched)
            if self._stops.ended:
                self._finish()
        if finished and not self.finished:
            self._finish()
        return self.ids[before:]

    @property
    def finish_reason(self) -> str:
        """`stop` where the model ended its text or wrote a stop string, `length` where the limit did."""
        return "stop" if self._stops.ended or (self.ids and self.ids[-1] in self._stop_ids) else "length"

    @property
    def stop(self) -> str | int | None:
        """The string or the token that ended the text; None while it goes on and where the limit did."""
        if self._stops.found is not None:
            return self._stops.found
        return self.ids[-1] if self.finished and self.ids and self.ids[-1] in self._stop_ids else None

    @property
    def settled(self) -> int:
        """How many of `ids` are sure to belong to the text: no stop string that they may be part of is open."""
        if self.finished or not self._one_by_one:
            return len(self.ids)
        return bisect.bisect_right(self._ends, self._stops.passed)

    @property
    def call_pieces(self) -> list[CallPiece]:
        """Tool calls as they are written; see `ResponseStream.call_pieces`."""
        return self._stream.call_pieces if self._stream else []

    def _raw(self, text: str) -> list[Piece]:
        return [Piece("answer", text)]

    def _finish(self) -> None:
        self.finished = True
        rest, response = self._stream.finish() if self._stream else (self._raw(self._decoder.flush()), self.response)
        self._take(rest)
        self._show(Piece("answer", self._stops.flush()))
        if self._stops.ended:
            del self.ids[bisect.bisect_left(self._ends, self._stops.end) + 1 :]
        self.response = dataclasses.replace(response, answer=self._answer)

    def _take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.part == "answer":
                self._searched += len(piece.text)
                piece = Piece("answer", self._stops.push(piece.text))
            self._show(piece)

    def _show(self, piece: Piece) -> None:
        if piece.text:
            self.pending.append(piece)
            self._answer += piece.text if piece.part == "answer" else ""


class Screen:
    """Shows the prompts' texts one after the other, the first unfinished one as it grows."""

    def __init__(self, prompts: Sequence[Prompt], readers: Sequence[Reader]):
        self.console = OutputConsole(soft_wrap=True)
        self.prompts, self.readers = prompts, readers
        self.current = 0
        self._part: str | None = None
        self._return = ""
        """A carriage return that may be half of a line end."""

    def update(self) -> None:
        """Prints what can be shown now."""
        while self.current < len(self.readers):
            reader = self.readers[self.current]
            for piece in reader.pending:
                self._show(piece)
            reader.pending.clear()
            if not reader.finished:
                return
            for call in reader.response.tool_calls:
                self._head()
                if call.error is None:
                    self._write(f"\n→ {call.name}({call.arguments})", "cyan")
                else:
                    self._write(f"\n→ no call: {call.error}: {call.id}({call.arguments})", "red")
            self._head()
            self._write("\n")
            self.current, self._part = self.current + 1, None

    def _head(self) -> None:
        if self._part is None and len(self.readers) > 1:
            prompt = self.prompts[self.current]
            name = "" if prompt.id is None else f" ({prompt.id})"
            self._write(f"── {self.current + 1}{name}: {prompt.label}\n", "bold")
        self._part = self._part or "head"

    def _show(self, piece: Piece) -> None:
        self._head()
        if piece.part != self._part:
            if piece.part == "thinking":
                self._write("thinking: ", "dim")
            elif self._part == "thinking":
                self._write("\n\n")
        self._part = piece.part
        self._write(piece.text, "dim" if piece.part == "thinking" else "")

    def _write(self, text: str, style: str = "") -> None:
        if self.console.is_terminal:
            text = self._return + text
            self._return = "\r" if text.endswith("\r") else ""
            text = harmless(text.removesuffix("\r"))
        # A segment goes out as it is, where rich's text loses tabs, control characters and :names: of emoji.
        self.console.print(Segments([Segment(text, Style.parse(style))]), end="", soft_wrap=True)
