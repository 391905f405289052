"""Answers in the API's words: whole ones, and the chunks of streams."""

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from kimi_jax.chat import CallPiece
from kimi_jax.server.choices import Choice, Delta, merged
from kimi_jax.server.mailbox import Told
from kimi_jax.tokenizer import IncrementalDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class Echo:
    """A prompt that a completion begins with."""

    ids: Sequence[int]
    text: str


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens that a request took."""

    prompt: int
    completion: int
    cached: int = 0

    def as_dict(self) -> dict[str, Any]:
        """As the API names them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Form:
    """How answers of one endpoint are written."""

    kind = whole_object = chunk_object = ""

    def __init__(
        self, id: str, model: str, tokenizer: Tokenizer, *, logprobs: int | None, ids: bool, skip_special: bool
    ):
        """The form of one answer.

        Args:
          id: of the request.
          model: its name.
          logprobs: most likely tokens told beside each; None tells no log-probabilities.
          ids: token ids are told too.
          skip_special: control tokens are no text.
        """
        self.id, self.tokenizer, self.logprobs, self.ids = f"{self.kind}-{id}", tokenizer, logprobs, ids
        self.skip_special = skip_special
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The answer to a request that wants no stream."""
        return self._head | {"object": self.whole_object, "choices": choices, "usage": usage.as_dict()}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A piece of a stream."""
        return self._head | {"object": self.chunk_object, "choices": [choice]}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last piece of a stream, where it is wanted."""
        return self._head | {"object": self.chunk_object, "choices": [], "usage": usage.as_dict()}

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with, if anything."""
        raise NotImplementedError

    def piece(self, choice: Choice, delta: Delta, echo: Echo | None = None) -> dict[str, Any]:
        """A choice in a chunk."""
        raise NotImplementedError

    def answer(self, choice: Choice, delta: Delta, echo: Echo | None = None) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def _choice(self, choice: Choice, delta: Delta, logprobs: Any, what: dict[str, Any]) -> dict[str, Any]:
        ended = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        found = {"index": choice.index, **what, "logprobs": logprobs, **ended}
        return found | ({"token_ids": delta.ids} if self.ids else {})


class ChatForm(Form):
    """Answers of /v1/chat/completions."""

    kind, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, choice: Choice, delta: Delta, echo: Echo | None = None) -> dict[str, Any]:
        told: dict[str, Any] = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        told |= {"content": delta.content} if delta.content else {}
        if delta.calls:
            told["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.calls]
        return self._choice(choice, delta, self._logprobs(delta), {"delta": told})

    def answer(self, choice: Choice, delta: Delta, echo: Echo | None = None) -> dict[str, Any]:
        calls = [_call(call) for call in merged(delta.calls)]
        message: dict[str, Any] = {"role": "assistant", "content": delta.content or (None if calls else "")}
        message |= {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return self._choice(choice, delta, self._logprobs(delta), {"message": message})

    def _logprobs(self, delta: Delta) -> Any:
        if self.logprobs is None:
            return None
        pairs = zip(delta.ids, delta.told, strict=True)
        return {"content": [self._token(token, told.logprob, told.top) for token, told in pairs], "refusal": None}

    def _token(self, token: int, logprob: float, top: Sequence[tuple[int, float]] | None = None) -> dict[str, Any]:
        data = self.tokenizer.decode_bytes([token])
        found = {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": [*data]}
        return found if top is None else found | {"top_logprobs": [self._token(*each) for each in top]}


def _call(call: CallPiece) -> dict[str, Any]:
    """A call's beginning, with its id and name, or more of its arguments."""
    if not call.id:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclasses.dataclass
class _Offsets:
    """Where tokens begin in a text."""

    characters: int = 0
    decoder: IncrementalDecoder | None = None

    def of(self, ids: Sequence[int], decoder: IncrementalDecoder) -> list[int]:
        """Characters before each token of the text's next ones."""
        starts = []
        for token in ids:
            starts.append(self.characters)
            self.characters += len(decoder.push([token]))
        return starts


class CompletionForm(Form):
    """Answers of /v1/completions."""

    kind, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how)
        self._offsets: dict[int, _Offsets] = {}

    def opening(self, index: int) -> None:
        return None

    def piece(self, choice: Choice, delta: Delta, echo: Echo | None = None) -> dict[str, Any]:
        text = ("" if echo is None else echo.text) + delta.content
        return self._choice(choice, delta, self._logprobs(choice, delta, echo), {"text": text})

    answer = piece

    def _logprobs(self, choice: Choice, delta: Delta, echo: Echo | None) -> Any:
        if self.logprobs is None:
            return None
        offsets = self._offsets.setdefault(choice.index, _Offsets())
        ids: list[int] = [*delta.ids]
        told: list[Told | None] = [*delta.told]
        starts: list[int] = []
        if echo is not None:
            starts = offsets.of(echo.ids, self.tokenizer.decoder())
            offsets.characters = len(echo.text)
            ids, told = [*echo.ids, *ids], [*choice.prompt_told, *told]
        if offsets.decoder is None:
            offsets.decoder = self.tokenizer.decoder(skip_special=self.skip_special)
        starts += offsets.of(delta.ids, offsets.decoder)
        top = [None if each is None else dict(self._tops(id, each)) for id, each in zip(ids, told, strict=True)]
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": [None if each is None else each.logprob for each in told],
            "top_logprobs": top if self.logprobs else None,
            "text_offset": starts,
        }

    def _tops(self, token: int, told: Told) -> list[tuple[str, float]]:
        """The most likely tokens, and behind them the one that is there where it is none of them."""
        own = [] if any(id == token for id, _ in told.top) else [(token, told.logprob)]
        return [(self._name(id), logprob) for id, logprob in [*told.top, *own]]

    def _name(self, token: int) -> str:
        data = self.tokenizer.decode_bytes([token])
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ALIVE = b": alive\n\n"
"""A comment, which keeps a connection open through proxies that would take silence for its end."""
