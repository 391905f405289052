"""Prompts as users give them: text or conversations, from arguments or files, to token ids."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_jax.chat import render
from kimi_jax.text_files import lines_of, read_text
from kimi_jax.tokenizer import Tokenizer


class PromptError(ValueError):
    """A prompt file that cannot be read; the text names the file, the line and what is expected."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation, or one text."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, text: str) -> "Prompt":
        """A single user message."""
        return cls(({"role": "user", "content": text},))

    @property
    def text(self) -> str:
        """The last message's text, which may be empty: its text parts joined, where it has parts."""
        content = self.messages[-1].get("content") or ""
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    @property
    def label(self) -> str:
        """The text's first line with something in it, to head a result."""
        return next((line.strip() for line in lines_of(self.text) if line.strip()), "(empty)")


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: with the ending .jsonl one JSON object a line, otherwise one text a line; empty lines skipped.

    A JSON line is `{"messages": […], "tools": […]}`, `tools` being optional, or a list of messages alone. Lines end at
    LF or CRLF; other separators, such as U+2028, are text.

    Raises:
      PromptError: a line that is neither, or a file without prompts.
      TextError: the file is not UTF-8.
    """
    lines = lines_of(read_text(path))
    parse = _from_json if path.suffix == ".jsonl" else lambda line, where: Prompt.of(line)
    prompts = [parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"{path}: there is no prompt in it")
    return prompts


def _from_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where}: not JSON ({error}); a .jsonl file has one conversation a line") from None
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list) or not value["messages"]:
        raise PromptError(f'{where}: expected {{"messages": […]}} with at least one message')
    if not all(isinstance(message, dict) for message in value["messages"]):
        raise PromptError(f"{where}: every message is a JSON object with role and content")
    tools = value.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise PromptError(f"{where}: tools is a list of JSON objects, each with type and function")
    return Prompt(tuple(value["messages"]), tuple(tools))


def encode(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    *,
    raw: bool,
    thinking: bool,
    system: str | None,
    preserve_thinking: bool = False,
) -> list[list[int]]:
    """Ids of each prompt: in the chat template (options as for `chat.render`), or with `raw` the text itself.

    Raises:
      PromptError: a conversation or a system message together with `raw`.
      MessageError: a message the template cannot take.
    """
    if raw:
        if system is not None or any(len(prompt.messages) > 1 or prompt.tools for prompt in prompts):
            raise PromptError("raw prompts are plain text: leave out the system message, tools and conversations")
        return [tokenizer.encode(prompt.text) for prompt in prompts]
    first = [] if system is None else [{"role": "system", "content": system}]
    return [
        render(
            [*first, *prompt.messages],
            tokenizer,
            tools=prompt.tools or None,
            thinking=thinking,
            preserve_thinking=preserve_thinking,
        )
        for prompt in prompts
    ]
