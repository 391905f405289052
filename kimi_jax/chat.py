"""Kimi K2.6's chat format: messages to token ids, and generated ids back to thinking, answer and tool calls.

A message is `<|im_user|>`, `<|im_assistant|>` or `<|im_system|>`, the role or name, `<|im_middle|>`, the content and
`<|im_end|>`, with nothing between messages and no default system message. The ids are built from special ids and
encoded text, never from one rendered string, so text from a user or a tool cannot become a control token.
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kimi_jax.tokenizer import Tokenizer
from kimi_jax.tool_declaration import SchemaError, sort_keys, typescript_declaration
from kimi_jax.tool_names import name_of
from kimi_jax.vision.media import MediumError, Shown

Message = Mapping[str, Any]
Look = Callable[[Mapping[str, Any], str], Sequence[Shown]]
"""Takes an image's or a video's part of a message, and where it stands; says what stands for it."""

_ROLE_TOKENS = {
    "system": "<|im_system|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
    "tool": "<|im_system|>",
}
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_THINK, _END_THINK = "<think>", "</think>"
_SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_BEGIN, _CALL_ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class MessageError(ValueError):
    """A message or tool that cannot be rendered; the text says which one, why, and what to write instead."""


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    preserve_thinking: bool = False,
    add_generation_prompt: bool = True,
    look: Look | None = None,
) -> list[int]:
    """Token ids of a conversation in Kimi K2.6's chat format.

    Args:
        messages: OpenAI-style messages. `role` is system, user, assistant or tool; `content` is a string or a list
            of parts: texts and, for `look`, images and videos. `name` replaces the role's name in the header. An
            assistant message may carry its thinking as `reasoning_content` (or `reasoning`) and calls as `tool_calls`;
            a tool message answers the call named by `tool_call_id`.
        tokenizer: the checkpoint's tokenizer.
        tools: OpenAI-style function tools, declared to the model as TypeScript (as JSON, with a warning, where a
            schema cannot be written in TypeScript).
        thinking: whether the answer to come starts with thinking; `False` is instant mode.
        preserve_thinking: keep the thinking of every assistant turn. By default it is dropped up to and including
            the last assistant message without tool calls, so that only a running chain of calls keeps it. Instant
            mode keeps none.
        add_generation_prompt: end with the header of the assistant's answer.
        look: takes parts that are images or videos, as `vision.parts.Album.look` does; without it they are refused.

    Raises:
        MessageError: a message or tool is malformed, or holds an image that cannot be shown.
    """
    if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence) or not messages:
        raise MessageError("messages must be a non-empty list of messages such as {'role': 'user', 'content': 'Hi'}")
    prompt = _Prompt(tokenizer, look)
    if tools:
        prompt.special("<|im_system|>").text("tool_declare").special("<|im_middle|>")
        prompt.text(_declaration(tools)).special("<|im_end|>")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    answered = -1
    if not preserve_thinking:
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")]
        answered = answers[-1] if answers else -1
    for index, message in enumerate(messages):
        _add_message(prompt, message, f"messages[{index}]", keep_thinking=thinking and index > answered)
    if add_generation_prompt:
        prompt.special("<|im_assistant|>").text("assistant").special("<|im_middle|>").special(_THINK)
        if not thinking:
            prompt.special(_END_THINK)
    return prompt.ids()


def placeholders(shown: Iterable[Shown], tokenizer: Tokenizer) -> list[int]:
    """Token ids that stand for images or a video before a text that has no template."""
    return _Prompt(tokenizer).shown(shown).ids()


@dataclass(frozen=True)
class ToolCall:
    """One tool call of a response.

    Attributes:
        id: the call's id as the model wrote it, normally `functions.NAME:INDEX`, without spaces around it.
        name: the function's name taken from the id (`tool_names.name_of`); empty where the id does not say it.
        arguments: the arguments' JSON text as the model wrote it.
        error: why the call cannot be made (unfinished, no name, a name that is not declared, arguments that are not a
            JSON object), else None.
    """

    id: str
    name: str
    arguments: str
    error: str | None = None


@dataclass(frozen=True)
class Response:
    """A finished response: its thinking, its answer and its tool calls."""

    thinking: str
    answer: str
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The response as an assistant message for the next turn's `render`; calls with an error are left out."""
        message: dict[str, Any] = {"role": "assistant", "content": self.answer}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        calls = [call for call in self.tool_calls if call.error is None]
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message


@dataclass(frozen=True)
class Piece:
    """A stretch of text that can be shown now, and the part of the response it belongs to."""

    part: Literal["thinking", "answer"]
    text: str


@dataclass(frozen=True)
class CallPiece:
    """A stretch of a tool call as the model writes it: first its id and name, then its arguments in pieces."""

    index: int
    """Number of the call in its response, from 0."""
    arguments: str = ""
    id: str = ""
    """In the first piece only."""
    name: str = ""
    """As `ToolCall.name`; in the first piece only."""


class ResponseStream:
    """Splits one request's generated ids, as they arrive, into thinking, answer and tool calls.

    Push ids as they are generated and show the pieces; call `finish` once at the end. Any sequence of ids is
    accepted. Control tokens are not shown, and ids after `<|im_end|>` or `[EOS]` are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool = True, tools: Sequence[Mapping[str, Any]] | None = None):
        """Start a response.

        Args:
            tokenizer: the checkpoint's tokenizer.
            thinking: whether the prompt left the thinking part open, as `render` was told.
            tools: those declared to the model, as `render` was given them; calls name one of them.
        """
        self._declared = frozenset(tool["function"]["name"] for tool in tools or ())
        self._tokenizer = tokenizer
        self._names = {token: name for name, token in tokenizer.special_ids.items()}
        self._decoder = tokenizer.decoder()
        self._part: Literal["thinking", "answer"] = "thinking" if thinking else "answer"
        self._within: Literal["text", "call id", "call arguments"] = "text"
        self._ended = False
        self._texts = {"thinking": "", "answer": ""}
        self._call: dict[str, list[int]] = {"call id": [], "call arguments": []}
        self._calls: list[ToolCall] = []
        self._arguments = tokenizer.decoder()
        self.call_pieces: list[CallPiece] = []
        """Calls as they are written, for who shows them before they are whole, who empties the list; a call without
        arguments is not among them."""

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """Text completed by `ids`."""
        pieces: list[Piece] = []
        for token in ids:
            if self._ended:
                break
            name = self._names.get(token)
            if name is not None:
                self._control(name, pieces)
            elif self._within == "text":
                self._show(self._decoder.push([token]), pieces)
            else:
                self._call[self._within].append(token)
                if self._within == "call arguments":
                    self._show_call(self._arguments.push([token]))
        return pieces

    def finish(self) -> tuple[list[Piece], Response]:
        """The last piece (an unfinished character shows as U+FFFD), and the whole response."""
        pieces: list[Piece] = []
        self._show(self._decoder.flush(), pieces)
        self._close_call("the response ended inside the call")
        self._ended = True
        return pieces, Response(self._texts["thinking"], self._texts["answer"], tuple(self._calls))

    def _control(self, name: str, pieces: list[Piece]):
        self._show(self._decoder.flush(), pieces)
        if name in ("<|im_end|>", "[EOS]"):
            self._ended = True
        elif name == _CALL_ARGUMENTS and self._within == "call id":
            self._within = "call arguments"
            call_id = self._tokenizer.decode(self._call["call id"]).strip()
            self.call_pieces.append(CallPiece(len(self._calls), "", call_id, name_of(call_id, self._declared)[0]))
        elif name == _CALL_END:
            self._close_call(None if self._within == "call arguments" else "the call has no arguments")
        elif name in (_CALL_BEGIN, _SECTION_BEGIN, _SECTION_END):
            self._close_call(f"{name} came inside the call")
            # A call ends the thinking even where the model did not close it.
            self._part = "answer"
            self._within = "call id" if name == _CALL_BEGIN else "text"
        elif name in (_THINK, _END_THINK) and self._within == "text":
            self._part = "thinking" if name == _THINK else "answer"

    def _show(self, text: str, pieces: list[Piece]):
        if text:
            self._texts[self._part] += text
            pieces.append(Piece(self._part, text))

    def _show_call(self, arguments: str):
        if arguments:
            self.call_pieces.append(CallPiece(len(self._calls), arguments))

    def _close_call(self, error: str | None):
        if self._within == "text":
            return
        self._show_call(self._arguments.flush())
        call_id, arguments = (self._tokenizer.decode(ids) for ids in self._call.values())
        call_id = call_id.strip()
        self._call = {"call id": [], "call arguments": []}
        self._within = "text"
        name, unnamed = name_of(call_id, self._declared)
        error = error or unnamed
        if error is None:
            try:
                if not isinstance(json.loads(arguments, parse_constant=_refuse_constant), dict):
                    error = "the arguments are not a JSON object"
            except (ValueError, RecursionError) as problem:
                error = f"the arguments are not JSON: {problem}"
        self._calls.append(ToolCall(call_id, name, arguments, error))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def parse(
    ids: Iterable[int], tokenizer: Tokenizer, *, thinking: bool = True, tools: Sequence[Mapping[str, Any]] | None = None
) -> Response:
    """Thinking, answer and tool calls of generated `ids`.

    Args:
        ids: what the model generated after `render(..., thinking=thinking)`; a stop token may be among them.
        tokenizer: the checkpoint's tokenizer.
        thinking: the mode the prompt was rendered in.
        tools: those it declared.
    """
    stream = ResponseStream(tokenizer, thinking, tools)
    stream.push(ids)
    return stream.finish()[1]


class _Prompt:
    """Collects special ids and text; neighbouring texts are encoded as one, for BPE sees across their seam."""

    def __init__(self, tokenizer: Tokenizer, look: Look | None = None):
        self._tokenizer, self._look = tokenizer, look
        self._ids: list[int] = []
        self._pending = ""

    def text(self, text: str) -> _Prompt:
        self._pending += text
        return self

    def special(self, name: str) -> _Prompt:
        self._ids = self.ids()
        self._pending = ""
        self._ids.append(self._tokenizer.special_id(name))
        return self

    def media(self, part: Mapping[str, Any], where: str) -> _Prompt:
        """Placeholders for what a part shows, in the words that K2.6 knows images and videos by."""
        if self._look is None:
            raise MessageError(
                f"{where} is of type {part['type']!r}, and this checkpoint has no vision tower to see it: open one "
                "that has, or describe it in text"
            )
        try:
            shown = self._look(part, where)
        except MediumError as error:
            raise MessageError(str(error)) from None
        return self.shown(shown)

    def shown(self, shown: Iterable[Shown]) -> _Prompt:
        """Placeholders, as K2.6's template and its processor write them."""
        for each in shown:
            self.text(each.before).special("<|media_begin|>").text(each.kind).special("<|media_content|>")
            self._ids += [self._tokenizer.special_id("<|media_pad|>")] * each.tokens
            self.special("<|media_end|>")
        return self.text("\n")

    def ids(self) -> list[int]:
        return self._ids + self._tokenizer.encode(self._pending)


def _add_message(prompt: _Prompt, message: Message, where: str, *, keep_thinking: bool):
    role = message["role"]
    prompt.special(_ROLE_TOKENS[role]).text(message.get("name") or role).special("<|im_middle|>")
    if role == "assistant":
        prompt.special(_THINK).text(_reasoning(message, where) if keep_thinking else "").special(_END_THINK)
    if role == "tool":
        prompt.text(f"## Return of {message['tool_call_id']}\n")
    _add_content(prompt, message.get("content"), where)
    if message.get("tool_calls"):
        prompt.special(_SECTION_BEGIN)
        for call in message["tool_calls"]:
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                arguments = _json(arguments, where)
            prompt.special(_CALL_BEGIN).text(call["id"]).special(_CALL_ARGUMENTS).text(arguments).special(_CALL_END)
        prompt.special(_SECTION_END)
    prompt.special("<|im_end|>")


def _json(arguments: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MessageError(f"{where} calls a tool with arguments that have no JSON form: {error}") from None


def suggestion(key: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown key: the known one that looks like it, or all of them."""
    near = difflib.get_close_matches(key.lower(), known, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


def _check_message(message: Message, where: str):
    if not isinstance(message, Mapping):
        raise MessageError(f"{where} is {type(message).__name__}, not an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLE_TOKENS:
        raise MessageError(f"{where} has role {role!r}; use system, user, assistant or tool")
    for key, value in message.items():
        # Messages that come from a service hold keys without a value, such as "refusal": null.
        if key not in _MESSAGE_KEYS and value not in (None, False, "", [], {}):
            raise MessageError(f"{where} has no use for the key {key!r}{suggestion(str(key), _MESSAGE_KEYS)}")
    if not isinstance(message.get("name") or "", str):
        raise MessageError(f"{where} has name {message['name']!r}, not a string")
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise MessageError(f"{where} has role {role!r} and tool_calls; only an assistant calls tools")
    if message.get("content") is None and not calls:
        raise MessageError(f"{where} ({role}) has no content; give a string, which may be empty")
    if role == "tool" and not (isinstance(message.get("tool_call_id"), str) and message["tool_call_id"]):
        raise MessageError(f"{where} (tool) has no tool_call_id; give the id of the call that it answers")
    if calls is not None and not isinstance(calls, list | tuple):
        raise MessageError(f"{where}.tool_calls is {type(calls).__name__}, not a list")
    for index, call in enumerate(calls or []):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str | Mapping):
            raise MessageError(
                f"{where}.tool_calls[{index}] needs a 'function' with 'name' and 'arguments' (JSON text or an object)"
            )
        if not isinstance(call.get("id"), str) or not call["id"]:
            raise MessageError(f"{where}.tool_calls[{index}] has no id; Kimi names calls functions.NAME:INDEX")


def _add_content(prompt: _Prompt, content: Any, where: str):
    if content is None or isinstance(content, str):
        prompt.text(content or "")
        return
    if not isinstance(content, list | tuple):
        raise MessageError(f"{where}.content is {type(content).__name__}; give a string or a list of parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("image", "image_url", "video", "video_url"):
            prompt.media(part, f"{where}.content[{index}]")
        elif kind == "text" and isinstance(part.get("text"), str):
            prompt.text(part["text"])
        else:
            raise MessageError(f"{where}.content[{index}] is not a part such as {{'type': 'text', 'text': 'Hi'}}")


def _reasoning(message: Message, where: str) -> str:
    given = [message[key] for key in ("reasoning_content", "reasoning") if message.get(key)] or [""]
    if not isinstance(given[0], str):
        raise MessageError(f"{where} has reasoning of type {type(given[0]).__name__}, not a string")
    if given[-1] != given[0]:
        raise MessageError(f"{where} has both reasoning and reasoning_content, and they differ; keep one")
    return given[0]


def _declaration(tools: Sequence[Mapping[str, Any]]) -> str:
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]):
            raise MessageError(
                f"tools[{index}] is not {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}"
            )
    try:
        return typescript_declaration([tool["function"] for tool in tools])
    except SchemaError as error:
        warnings.warn(f"tools are declared as JSON, because a schema has no TypeScript form: {error}", stacklevel=3)
        return json.dumps(sort_keys(tools), ensure_ascii=False, separators=(",", ":"))
