"""Prompts as users give them: text or conversations, from arguments or files, to token ids."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_jax.chat import Look, MessageError, render, suggestion
from kimi_jax.text_files import lines_of, read_text, require_utf8
from kimi_jax.tokenizer import Tokenizer


class PromptError(ValueError):
    """A prompt that cannot be read; the text names the file, the line and what is expected."""


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a prompt says of its own answer; None leaves it to the command."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are no part of it."""


NO_WISHES = Wishes()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation, or one text."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    id: str | int | None = None
    """The row's own name, which its result keeps."""
    wishes: Wishes = NO_WISHES
    plain: bool = False
    """A text, which may go to the model without a template; `messages` then holds it as the user's."""
    where: str = dataclasses.field(default="", compare=False)
    """File and line, to name the prompt in an error."""

    @classmethod
    def of(cls, text: str, images: Sequence[Path] = ()) -> "Prompt":
        """A text: in the template a single user message, with images before it."""
        if not images:
            return cls(({"role": "user", "content": text},), plain=True)
        parts: list[dict[str, Any]] = [{"type": "image", "image": str(path)} for path in images]
        return cls(({"role": "user", "content": [*parts, {"type": "text", "text": text}]},))

    @property
    def text(self) -> str:
        """The last message's text, which may be empty: its text parts joined, where it has parts."""
        content = self.messages[-1].get("content") or ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    @property
    def label(self) -> str:
        """The text's first line with something in it, to head a result."""
        return next((line.strip() for line in lines_of(self.text) if line.strip()), "(empty)")


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: with the ending .jsonl one JSON object a line, otherwise one text a line; empty lines skipped.

    A JSON line is `{"messages": […]}` or `{"prompt": "…"}` with the keys of `KEYS`, or a list of messages alone. Lines
    end at LF or CRLF; other separators, such as U+2028, are text.

    Raises:
      PromptError: a line that is neither, with the key that is unknown or the value that cannot be; a file without
        prompts.
      TextError: the file is not UTF-8.
    """
    lines = lines_of(read_text(path))
    parse = _from_json if path.suffix == ".jsonl" else lambda line, where: Prompt.of(line)
    prompts = [parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{path}: there is no prompt in it")
    return prompts


_LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens")
_NUMBERS = ("temperature", "top_p", "min_p")
_AS_IT_IS = {"n": 1, "stream": False, "tool_choice": "auto"}
"""Keys of chat requests whose one value says what is done anyway."""
KEYS = (
    *("messages", "prompt", "tools", "id", "custom_id"),
    *(*_LIMITS, *_NUMBERS, "top_k", "seed", "stop"),
    *_AS_IT_IS,
)
"""Keys of a row, named as in chat requests and their batch files."""


def _from_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
        require_utf8(json.dumps(value, ensure_ascii=False), where)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON ({error}); a .jsonl file has one conversation a line") from None
    except ValueError as error:
        raise PromptError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise PromptError(f'{where}: expected {{"messages": […]}} or {{"prompt": "…"}}')
    for key in value:
        if key not in KEYS:
            raise PromptError(f"{where}: a row has no key {key!r}{suggestion(key, KEYS)}")
    row = {key: given for key, given in value.items() if given is not None}
    for key, only in _AS_IT_IS.items():
        if key in row and (row[key] != only or isinstance(row[key], bool) != isinstance(only, bool)):
            raise PromptError(f"{where}: {key} is {json.dumps(row[key])}; only {json.dumps(only)} is possible here")
    messages, plain = _messages(row, where)
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError(f"{where}: tools is a list of JSON objects, each with type and function")
    name = _one_of(row, ("id", "custom_id"), where)
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise PromptError(f"{where}: id is {json.dumps(name)}; it is a text or a whole number")
    return Prompt(messages, tuple(tools), name, _wishes(row, where), plain, where)


def _messages(row: Mapping[str, Any], where: str) -> tuple[tuple[dict[str, Any], ...], bool]:
    """A row's messages, and whether they stand for a text."""
    if "messages" in row and "prompt" in row:
        raise PromptError(f"{where}: has both messages and prompt; keep one")
    given = row.get("prompt", row.get("messages"))
    if "prompt" in row and isinstance(given, str):
        return Prompt.of(given).messages, True
    if not isinstance(given, list) or not given:
        raise PromptError(f'{where}: expected {{"messages": […]}} with at least one message, or {{"prompt": "…"}}')
    if not all(isinstance(message, dict) for message in given):
        raise PromptError(f"{where}: every message is a JSON object with role and content")
    return tuple(given), False


def _wishes(row: Mapping[str, Any], where: str) -> Wishes:
    numbers: dict[str, Any] = {name: row.get(name) for name in (*_NUMBERS, "top_k", "seed")}
    numbers["max_new_tokens"] = _one_of(row, _LIMITS, where)
    for name, value in numbers.items():
        kind = int | float if name in _NUMBERS else int
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            what = "a number" if name in _NUMBERS else "a whole number"
            raise PromptError(f"{where}: {name} is {json.dumps(value)}; it must be {what}")
    if numbers["max_new_tokens"] is not None and numbers["max_new_tokens"] < 1:
        raise PromptError(f"{where}: the tokens to generate are {numbers['max_new_tokens']}; they must be positive")
    stop = row.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise PromptError(f"{where}: stop is {json.dumps(stop)}; it is a text or a list of texts, none of them empty")
    return Wishes(**numbers, stop=tuple(stops))


def _one_of(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """The value that stands under one of several names."""
    given = {name: row[name] for name in names if name in row}
    if any(value != next(iter(given.values())) for value in given.values()):
        raise PromptError(f"{where}: {' and '.join(given)} say the same thing and differ; keep one")
    return next(iter(given.values()), None)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object"
        )
    return value


def encode(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    raw: bool,
    thinking: bool,
    system: str | None,
    preserve_thinking: bool = False,
    looks: Sequence[Look | None] | None = None,
) -> list[list[int]]:
    """Ids of each prompt: in the chat template (options as for `chat.render`), or with `raw` the text itself.

    `looks` has what takes each prompt's images.

    Raises:
      PromptError: a conversation, tools or a system message together with `raw`, or an empty text.
      MessageError: a message the template cannot take.
      TextError: a text with a lone surrogate, which UTF-8 does not have.
    """
    if raw:
        return [tokenizer.encode(text) for text in raw_texts(prompts, system)]
    first = [] if system is None else [{"role": "system", "content": system}]
    ids = []
    for number, (prompt, look) in enumerate(zip(prompts, looks or [None] * len(prompts), strict=True), 1):
        where = prompt.where or f"prompt {number}"
        try:
            messages = [*first, *prompt.messages]
            require_utf8(json.dumps(messages, ensure_ascii=False), where)
            options: dict[str, Any] = {"thinking": thinking, "preserve_thinking": preserve_thinking, "look": look}
            ids.append(render(messages, tokenizer, tools=prompt.tools or None, **options))
        except MessageError as error:
            raise MessageError(f"{where}: {error}") from None
    return ids


def raw_texts(prompts: Sequence[Prompt], system: str | None) -> list[str]:
    """What goes to the model without a template.

    Raises:
      PromptError, TextError: as `encode` does.
    """
    texts = []
    for number, prompt in enumerate(prompts, 1):
        where = prompt.where or f"prompt {number}"
        if system is not None or prompt.tools or not prompt.plain:
            raise PromptError(
                f"{where}: raw prompts are plain text: leave out the system message, tools and conversations, or --raw"
            )
        if not prompt.text:
            raise PromptError(f"{where}: is empty, and raw text needs something to continue")
        texts.append(require_utf8(prompt.text, where))
    return texts
