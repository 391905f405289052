"""Text in, text out, for one prompt on an engine: what `Engine.chat`, `complete` and `stream` do."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from kimi_jax.chat import Piece, ToolCall, render
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.text_output import Reader
from kimi_jax.vision.media import Medium
from kimi_jax.vision.parts import Album

if TYPE_CHECKING:
    from kimi_jax.decoding.engine import Draft, Engine

DEFAULT_NEW_TOKENS = 512

Messages = str | Sequence[Mapping[str, Any]]
"""A user's text, the parts of a user's message, or a conversation as `chat.render` takes it; parts may be images
(`vision.parts.Album`)."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model wrote to one prompt."""

    text: str
    """The answer, without thinking, control tokens or the stop string that ended it."""
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop` where the model or a stop string ended the text, `length` where the limit did."""
    prompt_ids: list[int]
    token_ids: list[int]
    """Generated ids; the last may be a stop token."""


@dataclasses.dataclass(frozen=True)
class Text:
    """One prompt's text as it is generated: iterate over its pieces, then ask for the answer."""

    engine: "Engine"
    prompt_ids: list[int]
    media: Sequence[Medium]
    """The prompt's images."""
    reader: Reader
    limits: Limits
    sampling: Sampling
    seed: int
    draft: "Draft"

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of thinking and of the answer, as they can be shown. They come once."""
        how = (self.limits, self.sampling, self.seed, self.draft)
        for step in self.engine.generate([self.prompt_ids], *how, media=[self.media]):
            self.reader.push(step.new_tokens[0], step.finished[0])
            yield from self.reader.pending
            self.reader.pending.clear()
            if self.reader.finished:
                return

    def answer(self) -> Answer:
        """Decodes what is left of the text, and gives the whole."""
        if not self.reader.finished:
            for _ in self:
                pass
        response = self.reader.response
        return Answer(
            response.answer, response.thinking, response.tool_calls, self.reader.finish_reason, self.prompt_ids,
            self.reader.ids,
        )  # fmt: skip


class TextOptions(TypedDict, total=False):
    """How a text is generated."""

    max_new_tokens: int
    """512 by default."""
    sampling: Sampling
    """Greedy by default."""
    seed: int
    stop: Sequence[str]
    """Strings that end the answer; the first that appears, and what follows, are no part of it."""
    draft: "Draft"
    """By default the best tree of the size that pays, where the engine has a drafter."""


class ChatOptions(TextOptions, total=False):
    """How an answer is generated."""

    thinking: bool
    """Whether the model thinks before it answers, as it does by default."""
    tools: Sequence[Mapping[str, Any]]
    """Function tools that are declared to the model."""


def _conversation(messages: Messages) -> Sequence[Mapping[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not messages or not isinstance(messages, list | tuple):
        return messages  # which `render` refuses
    parts = all(isinstance(part, Mapping) and "type" in part and "role" not in part for part in messages)
    return [{"role": "user", "content": messages}] if parts else messages


def of_messages(engine: "Engine", messages: Messages, **options: Unpack[ChatOptions]) -> Text:
    """The assistant's next message.

    Raises:
      MessageError: messages or tools that are malformed.
    """
    conversation = _conversation(messages)
    thinking, tools = options.get("thinking", True), options.get("tools", ())
    album = album_of(engine)
    look = None if album is None else album.look
    ids = render(conversation, engine.tokenizer, tools=tools, thinking=thinking, look=look)
    return _text(engine, ids, [] if album is None else album.media, options, raw=False, thinking=thinking, tools=tools)


def album_of(engine: "Engine", *, files: bool = True, addresses: bool = False) -> Album | None:
    """What takes the images of one prompt, with `files` and `addresses` as `Album` has them; None without a tower."""
    if engine.vision is None:
        return None
    return Album(engine.vision.config.processing, files=files, addresses=addresses)


def of_text(engine: "Engine", text: str, **options: Unpack[TextOptions]) -> Text:
    """The text's continuation."""
    return _text(engine, engine.tokenizer.encode(text), [], options, raw=True, thinking=False)


def _text(engine: "Engine", ids: list[int], media: Sequence[Medium], options: TextOptions, **how: Any) -> Text:
    reader = Reader(engine.tokenizer, engine.stop_ids, stops=options.get("stop", ()), **how)
    limits = Limits(max_new_tokens=options.get("max_new_tokens", DEFAULT_NEW_TOKENS))
    draft = options.get("draft", engine.default_draft)
    sampling, seed = options.get("sampling", Sampling()), options.get("seed", 0)
    return Text(engine, ids, media, reader, limits, sampling, seed, draft)
