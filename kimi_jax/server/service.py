"""From a request's body to requests of the engine, and readers of what they will write."""

import dataclasses
import itertools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kimi_jax.chat import MessageError, render
from kimi_jax.decoding.sampling import Sampling, request_keys
from kimi_jax.decoding.state import STOPS
from kimi_jax.generation_defaults import SAMPLING_FIELDS, new_tokens
from kimi_jax.server.answers import ChatForm, CompletionForm, Echo, Form
from kimi_jax.server.bodies import Chat, Completion, Detokenize, Generation, TemplateOptions, Tokenize
from kimi_jax.server.choices import Choice
from kimi_jax.server.errors import ApiError, refusal
from kimi_jax.server.template import template_of
from kimi_jax.serving.plan import Request, Settings
from kimi_jax.text_files import TextError, require_utf8
from kimi_jax.text_output import Reader
from kimi_jax.tokenizer import Tokenizer
from kimi_jax.vision.config import VisionConfig
from kimi_jax.vision.media import Medium, with_content
from kimi_jax.vision.parts import Album


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A body that was understood."""

    requests: Sequence[Request]
    choices: Sequence[Choice]
    """One for each request."""
    echoes: Sequence[Echo | None]
    """What each choice's text begins with."""
    form: Form
    n: int
    """Choices of each prompt, which stand together."""
    stream: bool
    include_usage: bool


@dataclasses.dataclass(frozen=True)
class Service:
    """What answers depend on besides the request."""

    model: str
    """Name that clients ask for."""
    tokenizer: Tokenizer
    stop_ids: Sequence[int]
    """Tokens that end a text where a request does not say otherwise."""
    vocab_size: int
    capacity: int
    """Tokens of prompt and answer that a request may have."""
    sampling: Mapping[str, float]
    """How tokens are drawn where a request does not say."""
    thinking: bool = True
    """Whether the model thinks before it answers a chat, where the request does not say."""
    most_new_tokens: int | None = None
    """New tokens of a chat's answer where the request does not say; None follows the mode."""
    folder: Path | None = None
    """Of the checkpoint, which may have a chat template."""
    vision: VisionConfig | None = None
    """Of the checkpoint's tower; without one images are refused."""
    number: Callable[[], int] = dataclasses.field(default_factory=lambda: itertools.count().__next__)
    """Counts requests."""

    def chat(self, data: bytes) -> Prepared:
        """A body of /v1/chat/completions. Raises ApiError where it does not fit."""
        body = Chat.parse(data)
        self.check_model(body.model)
        thinking = self.thinking if body.thinks is None else body.thinks
        tools = body.tools if body.tool_choice == "auto" else []
        ids, media = self._render(body.messages, tools, thinking, body.keeps_thinking, body.add_generation_prompt)
        asked = body.max_tokens or body.max_completion_tokens
        if asked is None:
            room = self.capacity - len(ids)
            default = self.most_new_tokens or new_tokens(thinking, self.capacity, len(ids))
            most = max(1, min(default, room))
        else:
            most = asked
        form = self._form(ChatForm, body, body.top_logprobs if body.logprobs else None)
        how = {"raw": False, "thinking": thinking and body.add_generation_prompt, "tools": tools}
        return self._prepared(body, [ids], most, form, [None], how, calls=body.tool_choice == "auto", media=media)

    def completion(self, data: bytes) -> Prepared:
        """A body of /v1/completions. Raises ApiError where it does not fit."""
        body = Completion.parse(data)
        self.check_model(body.model)
        prompts = [self._prompt_ids(prompt) for prompt in body.prompts]
        form = self._form(CompletionForm, body, body.logprobs)
        echoes = [Echo(ids, self.tokenizer.decode(ids)) if body.echo else None for ids in prompts]
        how = {"raw": True, "thinking": False, "skip_special": body.skip_special_tokens}
        return self._prepared(body, prompts, body.max_tokens, form, echoes, how)

    def tokenize(self, data: bytes) -> dict[str, Any]:
        """The answer of /tokenize. Raises ApiError where the body does not fit."""
        body = Tokenize.parse(data)
        self.check_model(body.model)
        if body.messages is None:
            ids = self._encode(body.prompt or "")
        else:
            options = body.chat_template_kwargs
            thinking = self._thinks(options)
            preserve = options.preserve_thinking
            ids, _ = self._render(body.messages, body.tools, thinking, preserve, body.add_generation_prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.capacity}

    def detokenize(self, data: bytes) -> dict[str, Any]:
        """The answer of /detokenize. Raises ApiError where the body does not fit."""
        body = Detokenize.parse(data)
        self.check_model(body.model)
        self._check_ids("tokens", body.tokens)
        return {"prompt": self.tokenizer.decode(body.tokens)}

    def tokenizer_info(self) -> dict[str, Any]:
        """The answer of /tokenizer_info."""
        names = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
        known = {key: name if name in self.tokenizer.special_ids else None for key, name in names.items()}
        return known | {
            "tokenizer_class": "TikTokenTokenizer",
            "vocab_size": self.tokenizer.vocab_size,
            "max_model_len": self.capacity,
            "chat_template": template_of(self.folder, self.thinking),
        }

    def check_model(self, name: str | None) -> None:
        """Refuses the name of another model. Raises ApiError."""
        if name not in (None, self.model):
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.model!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def _thinks(self, options: TemplateOptions) -> bool:
        said = options.enable_thinking if options.thinking is None else options.thinking
        return self.thinking if said is None else said

    def _form(self, kind: type[Form], body: Generation, logprobs: int | None) -> Form:
        return kind(
            secrets.token_hex(12), self.model, self.tokenizer,
            logprobs=logprobs, ids=body.return_token_ids, skip_special=body.skip_special_tokens,
        )  # fmt: skip

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], thinking: bool, preserve: bool,
        generation: bool,
    ) -> tuple[list[int], list[Medium]]:  # fmt: skip
        """Ids of a conversation, with a placeholder for each token of its images, and the images."""
        album = None if self.vision is None else Album(self.vision.processing, files=False)
        # lm-eval's messages say that they are text.
        messages = [{k: v for k, v in each.items() if (k, v) != ("type", "text")} for each in messages]
        try:
            require_utf8(json.dumps([messages, tools], ensure_ascii=False), "the body")
            ids = render(
                messages, self.tokenizer, tools=tools, thinking=thinking, preserve_thinking=preserve,
                add_generation_prompt=generation, look=None if album is None else album.look,
            )  # fmt: skip
            return ids, [] if album is None else album.media
        except (MessageError, TextError, RecursionError) as error:
            raise refusal("tools" if str(error).startswith("tools") else "messages", str(error)) from None

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise refusal("prompt", "prompt is empty; the model needs something to continue")
            return self._encode(prompt)
        self._check_ids("prompt", prompt)
        return prompt

    def _encode(self, text: str) -> list[int]:
        """Ids of a text in which names of control tokens are these tokens, as in prompts that clients have rendered."""
        try:
            return self.tokenizer.encode(require_utf8(text, "prompt"), allow_special=True)
        except TextError as error:
            raise refusal("prompt", str(error)) from None

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise refusal(field, f"{field} has the token id {wrong}; ids lie in 0 .. {self.vocab_size - 1}")

    def _prepared(
        self,
        body: Generation,
        prompts: Sequence[list[int]],
        most: int,
        form: Form,
        echoes: Sequence[Echo | None],
        how: Mapping[str, Any],
        calls: bool = True,
        media: Sequence[Medium] = (),
    ) -> Prepared:
        """`media` are the images of each prompt."""
        for ids in prompts:
            self._check_room(len(ids), most)
        if body.n > 1 and len(prompts) > 1 and body.n * len(prompts) > 1024:
            raise refusal("n", f"n is {body.n} for {len(prompts)} prompts; at most 1,024 choices fit in an answer")
        stops = self._stop_ids(body)
        settings = self._settings(body, stops, form.logprobs)
        silent = [token for token in self.stop_ids if token not in stops]
        requests, choices, told = [], [], []
        for ids, echo in zip(prompts, echoes, strict=True):
            seen, placed = tuple(ids), ()
            if self.vision is not None and media:
                content, placed = with_content(ids, media, self.vision.placeholder_id)
                seen = tuple(content)
            for each in settings:
                reader = Reader(self.tokenizer, stops, stops=body.stop, silent_ids=silent, **how)
                choices.append(Choice(len(choices), reader, body.stop_token_ids, calls))
                each = each if echo is None else dataclasses.replace(each, prompt_logprobs=form.logprobs)
                requests.append(Request(f"{form.id}-{self.number()}", seen, most, each, media=placed))
                told.append(echo)
        return Prepared(requests, choices, told, form, body.n, body.stream, body.include_usage)

    def _check_room(self, prompt: int, most: int) -> None:
        if prompt + most > self.capacity:
            left = self.capacity - prompt
            advice = f"max_tokens of {left:,} would fit" if left > 0 else "the prompt must be shorter"
            raise ApiError(
                400, f"the prompt has {prompt:,} tokens and the answer up to {most:,}, and there is room for "
                f"{self.capacity:,}: {advice}", param="max_tokens" if left > 0 else "prompt",
                code="context_length_exceeded",
            )  # fmt: skip

    def _stop_ids(self, body: Generation) -> tuple[int, ...]:
        self._check_ids("stop_token_ids", body.stop_token_ids)
        stops = tuple(dict.fromkeys([*(() if body.ignore_eos else self.stop_ids), *body.stop_token_ids]))
        if len(stops) > STOPS:
            raise refusal(
                "stop_token_ids", f"stop_token_ids are {len(body.stop_token_ids)}; with the model's own there are "
                f"{len(stops)}, and {STOPS} fit",
            )  # fmt: skip
        return stops

    def _settings(self, body: Generation, stops: tuple[int, ...], logprobs: int | None) -> list[Settings]:
        """How each choice of a prompt is drawn."""
        said: dict[str, Any] = {"temperature": 1.0, **self.sampling}
        said |= {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
        if said.get("top_k") == -1:
            said["top_k"] = 0
        try:
            sampling = Sampling(**said)
        except ValueError as error:
            raise refusal(str(error).split()[0], str(error)) from None
        seed = secrets.randbits(63) if body.seed is None else body.seed
        keys = request_keys([seed] * body.n, range(body.n)).tolist()
        budget = 0 if body.speculation == "none" else None
        return [
            Settings(
                **dataclasses.asdict(sampling), key=(key[0], key[1]), stop_ids=stops, min_tokens=body.min_tokens,
                budget=budget, logprobs=logprobs,
            )
            for key in keys
        ]  # fmt: skip
