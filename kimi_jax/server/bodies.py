"""What clients send: JSON checked field by field. What is not supported is refused by name, never ignored."""

import json
from typing import Annotated, Any, Literal, Self

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field

from kimi_jax.chat import suggestion
from kimi_jax.decoding.sampling import SEEDS
from kimi_jax.decoding.state import STOPS
from kimi_jax.decoding.step import TOP
from kimi_jax.server.errors import ApiError, refusal

MOST_CHOICES, MOST_STOPS, LONGEST_STOP = 128, 16, 1024
"""Choices of a request, its stop strings and their characters, at most."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "add_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "service_tier": ("auto", "default"),
    "priority": (0,),
}
"""Fields that are not supported, with their values that ask for nothing."""
OF_THE_CLIENT = ("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id")
"""Fields that do not concern the answer."""


class Body(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The object that `data` is.

        Raises:
          ApiError: 400 with the field that is unknown, not supported or has a wrong value.
        """
        try:
            given = pydantic_core.from_json(data, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON in UTF-8: {error}") from None
        if not isinstance(given, dict):
            raise ApiError(400, f"the body is a JSON {_kind(given)}; it must be an object")
        given = {name: value for name, value in given.items() if value is not None}
        for name in given.keys() - cls.model_fields.keys():
            _check_unsupported(name, given.pop(name), [*cls.model_fields, *NEUTRAL])
        try:
            return cls.model_validate(given)
        except pydantic.ValidationError as error:
            raise _first(error) from None


def _check_unsupported(name: str, value: Any, known: list[str]) -> None:
    if name in OF_THE_CLIENT:
        return
    if name not in NEUTRAL:
        raise refusal(name, f"there is no field {name!r} here{suggestion(name, known)}")
    if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]):
        only = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
        raise refusal(name, f"{name} is {_shown(value)}, which is not supported; leave it out or send {only}")


def _first(error: pydantic.ValidationError) -> ApiError:
    """The first thing that a validation has found."""
    found = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
    param = str(found["loc"][0]) if found["loc"] else None
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return ApiError(400, str(cause), param=param)
    if found["type"] == "missing":
        return ApiError(400, f"{place} is missing", param=param)
    return ApiError(400, f"{place} is {_shown(found['input'])}: {found['msg'].lower()}", param=param)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean"}.get(type(value), "number" if value is not None else "null")


class StreamOptions(BaseModel):
    """What a stream tells besides."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False
    """Pads chunks to one length in others' servers; here they never are."""


Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]


class Generation(Body):
    """What both kinds of generations may say."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=SEEDS[0], le=SEEDS[1])
    temperature: float | None = Field(None, ge=0, le=1e30)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31)
    """-1 and 0 keep all."""
    min_p: float | None = Field(None, ge=0, le=1)
    stop: Stops = []
    stop_token_ids: list[int] = Field([], max_length=STOPS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=1 << 31)
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    speculation: Literal["none"] | None = None
    """`none` decodes this request without drafts; its text is the same."""

    @pydantic.field_validator("stop", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        if not value:
            return []
        return [value] if isinstance(value, str) else value

    @pydantic.model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams; send stream: true with them")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Completion(Generation):
    """A request to /v1/completions."""

    prompt: Any
    """A text, texts, a row of ids, or rows of ids."""
    max_tokens: int = Field(16, ge=0, le=1 << 31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=TOP)

    @pydantic.model_validator(mode="after")
    def _something_to_do(self) -> Self:
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens is 0, which leaves nothing to do; it must be positive without echo")
        return self

    @pydantic.field_validator("prompt")
    @classmethod
    def _texts_or_ids(cls, value: Any) -> Any:
        def ids(row: Any) -> bool:
            return isinstance(row, list) and bool(row) and all(type(token) is int for token in row)

        if isinstance(value, str) or ids(value):
            return value
        if isinstance(value, list) and value and (all(isinstance(x, str) for x in value) or all(map(ids, value))):
            return value
        raise ValueError("prompt must be a text, a list of texts, a list of token ids, or a list of such lists")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class Thinking(BaseModel):
    """Kimi's own way to say whether the model thinks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["enabled", "disabled"] = "enabled"
    keep: Literal["all"] | None = None


class TemplateOptions(BaseModel):
    """Options of the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    thinking: bool | None = None
    enable_thinking: bool | None = None
    """What other models' templates call it."""
    preserve_thinking: bool = False


Messages = Annotated[list[dict[str, Any]], Field(min_length=1)]


class Chat(Generation):
    """A request to /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOP)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    add_generation_prompt: bool = True

    @pydantic.field_validator("tool_choice", mode="before")
    @classmethod
    def _no_forced_calls(cls, value: Any) -> Any:
        if value not in ("auto", "none"):
            raise ValueError(f'tool_choice is {_shown(value)}, which is not supported; send "auto" or "none"')
        return value

    @pydantic.model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs are told beside logprobs; send logprobs: true with them")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens say the same thing and differ; keep one")
        wanted = {self.chat_template_kwargs.thinking, self.chat_template_kwargs.enable_thinking}
        wanted |= {None if self.thinking is None else self.thinking.type == "enabled"}
        if {True, False} <= wanted:
            raise ValueError("thinking is asked for and forbidden at the same time; keep one")
        return self

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think before it answers; None where nothing is said."""
        if self.thinking is not None:
            return self.thinking.type == "enabled"
        kwargs = self.chat_template_kwargs
        return kwargs.enable_thinking if kwargs.thinking is None else kwargs.thinking

    @property
    def keeps_thinking(self) -> bool:
        """Whether earlier turns' thinking stays in the prompt."""
        return self.chat_template_kwargs.preserve_thinking or (
            self.thinking is not None and self.thinking.keep == "all"
        )


class Tokenize(Body):
    """A request to /tokenize: a text, or a conversation as /v1/chat/completions takes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    add_generation_prompt: bool = True

    @pydantic.model_validator(mode="after")
    def _either(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Detokenize(Body):
    """A request to /detokenize."""

    model: str | None = None
    tokens: list[int]
