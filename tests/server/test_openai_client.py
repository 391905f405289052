"""The openai SDK against the server on a scripted engine: what it reads is what the model wrote."""

import json

import openai
import pytest

from tests.server.scripted import NOT_FINITE, SHAPE, logprob_of, scripted

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    "I look.<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Köln"}<|tool_call_end|>'
    '<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{"city": "Rom"}<|tool_call_end|>'
    "<|tool_calls_section_end|><|im_end|>"
)
TEXTS = {
    "plain": "The answer is 42.<|im_end|>",
    "thinking": "Let me see…</think>It is 42.<|im_end|>",
    "thinking left out": "</think>It is 42.<|im_end|>",
    "a call": CALLS,
    "a call inside thinking": f"I need the weather.{CALLS}",
    "characters": "naïve 漢字 🦊 — fine<|im_end|>",
}


@pytest.fixture(scope="module")
def server(tokenizer):
    """Answers with the text that the user's last message names."""
    texts = {name: tokenizer.encode(text, allow_special=True) for name, text in TEXTS.items()}

    def script(request):
        prompt = tokenizer.decode(request.ids)
        if "not finite" in prompt:
            return [*texts["plain"][: 3 if "late" in prompt else 0], NOT_FINITE]
        return texts[max(texts, key=lambda name: prompt.rfind(f"<|im_middle|>{name}<|im_end|>"))]

    with scripted(tokenizer, script) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def ask(client, name, thinking=False, **options):
    messages = [{"role": "user", "content": name}]
    extra = {"chat_template_kwargs": {"thinking": thinking}} | options.pop("extra_body", {})
    return client.chat.completions.create(model="m", messages=messages, extra_body=extra, **options)


def streamed(client, name, **options):
    """A stream's parts put together as clients do."""
    found = {"content": "", "reasoning": "", "calls": {}, "finish": None, "chunks": 0, "ids": [], "logprobs": []}
    for chunk in ask(client, name, stream=True, stream_options={"include_usage": True}, **options):
        if chunk.usage is not None:
            assert not chunk.choices
            found["usage"] = chunk.usage
            continue
        choice = chunk.choices[0]
        found["chunks"] += 1
        found["content"] += choice.delta.content or ""
        found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            begun = found["calls"].setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            begun["arguments"] += call.function.arguments or ""
        found["logprobs"] += choice.logprobs.content if choice.logprobs else []
        found["ids"] += getattr(choice, "token_ids", None) or []
        assert found["finish"] is None
        found["finish"] = choice.finish_reason
    return found


def test_a_chat(client):
    answer = ask(client, "plain")
    assert answer.choices[0].message.content == "The answer is 42."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens + answer.usage.prompt_tokens == answer.usage.total_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").max_model_len == 1024


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("thinking", [False, True])
def test_a_stream_is_the_whole_answer_in_pieces(client, name, thinking):
    options = {"thinking": thinking, "tools": [WEATHER], "extra_body": {"return_token_ids": True}}
    whole, parts = ask(client, name, **options), streamed(client, name, **options)
    choice = whole.choices[0]
    assert parts["content"] == (choice.message.content or "")
    assert parts["reasoning"] == getattr(choice.message, "reasoning_content", "")
    calls = [call.model_dump() for call in choice.message.tool_calls or []]
    assert [{"id": c["id"], **c["function"]} for c in calls] == [*parts["calls"].values()]
    assert parts["finish"] == choice.finish_reason
    assert parts["usage"].model_dump() == whole.usage.model_dump()
    assert parts["ids"] == choice.token_ids
    assert len(parts["ids"]) == whole.usage.completion_tokens


@pytest.mark.parametrize("name", ["a call", "a call inside thinking"])
@pytest.mark.parametrize("thinking", [False, True])
def test_calls_are_calls_wherever_the_model_writes_them(client, name, thinking):
    choice = ask(client, name, thinking, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [call.id for call in choice.message.tool_calls] == ["functions.get_weather:0", "functions.get_weather:1"]
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"city": "Köln"},
        {"city": "Rom"},
    ]
    text = ("I need the weather." if "inside" in name else "") + "I look."
    found = getattr(choice.message, "reasoning_content", "") if thinking else choice.message.content
    assert found == text


def test_the_parser_starts_where_the_prompt_ended(client):
    assert ask(client, "thinking", True).choices[0].message.reasoning_content == "Let me see…"
    assert ask(client, "thinking", True).choices[0].message.content == "It is 42."
    plain = ask(client, "plain", False).choices[0].message
    assert plain.content == "The answer is 42."
    assert not hasattr(plain, "reasoning_content")
    assert ask(client, "plain", True).choices[0].message.content == ""  # it never stopped to think


def test_a_round_trip_of_tools(client, server, tokenizer):
    message = ask(client, "a call", tools=[WEATHER]).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    history = [
        {"role": "user", "content": "a call"},
        message.model_dump(),
        *results,
        {"role": "user", "content": "plain"},
    ]
    off = {"thinking": {"type": "disabled"}}
    again = client.chat.completions.create(model="m", messages=history, tools=[WEATHER], extra_body=off)
    assert again.choices[0].message.content == "The answer is 42."
    rendered = server.post("/tokenize", messages=history, tools=[WEATHER]).json["tokens"]
    assert "## Return of functions.get_weather:1\nsunny" in tokenizer.decode(rendered)


def test_without_a_choice_of_tools_what_the_model_writes_is_text(client):
    choice = ask(client, "a call", tools=[WEATHER], tool_choice="none").choices[0]
    assert not choice.message.tool_calls
    assert (
        '<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{"city": "Rom"}'
        in choice.message.content
    )
    assert choice.finish_reason == "stop"


def test_log_probabilities(client):
    choice = ask(client, "plain", logprobs=True, top_logprobs=3).choices[0]
    told = choice.logprobs.content
    assert [each.logprob for each in told] == [logprob_of(index) for index in range(len(told))]
    assert all(len(each.top_logprobs) == 3 and each.top_logprobs[0].logprob == each.logprob for each in told)
    assert b"".join(bytes(each.bytes) for each in told).decode() == TEXTS["plain"]
    assert streamed(client, "plain", logprobs=True, top_logprobs=3)["logprobs"] == told


def test_completions(client, tokenizer):
    asked = {"model": "m", "prompt": "<|im_middle|>characters<|im_end|>", "max_tokens": 40}
    whole = client.completions.create(**asked, logprobs=2)
    text = TEXTS["characters"].removesuffix("<|im_end|>")
    assert whole.choices[0].text == text
    told = whole.choices[0].logprobs
    assert told.token_logprobs == [logprob_of(index) for index in range(len(told.tokens))]
    assert [len(top) for top in told.top_logprobs] == [2] * len(told.tokens)
    ids = tokenizer.encode(TEXTS["characters"], allow_special=True)
    before = [len(tokenizer.decode(ids[:index]).rstrip("�")) for index in range(len(ids))]
    assert told.text_offset == before
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, logprobs=2, stream=True)]
    assert "".join(part.text for part in parts) == text
    assert [x for part in parts for x in part.logprobs.text_offset] == before
    assert [x for part in parts for x in part.logprobs.tokens] == told.tokens
    assert parts[-1].finish_reason == whole.choices[0].finish_reason == "stop"


def test_several_prompts_and_choices_keep_their_order(client):
    names = ["plain", "characters", "thinking"]
    prompts = [f"<|im_middle|>{name}<|im_end|>" for name in names]
    answer = client.completions.create(model="m", prompt=prompts, n=2, max_tokens=40)
    assert [choice.index for choice in answer.choices] == [*range(6)]
    texts = [TEXTS[name].removesuffix("<|im_end|>").replace("</think>", "") for name in names for _ in range(2)]
    assert [choice.text.replace("</think>", "") for choice in answer.choices] == texts


def test_echo_begins_with_the_prompt(client):
    prompt = "<|im_middle|>plain<|im_end|>"
    answer = client.completions.create(model="m", prompt=prompt, echo=True, max_tokens=2)
    assert answer.choices[0].text.startswith(prompt)
    assert answer.choices[0].finish_reason == "length"
    parts = client.completions.create(model="m", prompt=prompt, echo=True, max_tokens=2, stream=True)
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


@pytest.mark.parametrize("most", [0, 3])
def test_echo_tells_the_prompts_log_probabilities(client, tokenizer, most):
    ids = tokenizer.encode("<|im_middle|>characters<|im_end|> naïve 漢字" * 9, allow_special=True)
    assert len(ids) > SHAPE.chunk  # it comes in pieces
    asked = {"model": "m", "prompt": [ids], "max_tokens": most, "echo": True, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0]
    told = whole.logprobs
    expected = [None, *map(logprob_of, range(1, len(ids))), *map(logprob_of, range(most))]
    assert told.token_logprobs == expected
    assert told.top_logprobs[0] is None
    assert [max(top.values()) for top in told.top_logprobs[1:]] == expected[1:]
    assert len(told.tokens) == len(told.text_offset) == len(ids) + most
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    assert [each for part in parts for each in part.logprobs.token_logprobs] == expected
    assert [each for part in parts for each in part.logprobs.text_offset] == told.text_offset


def test_errors_are_the_sdks_own(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt="a", presence_penalty=0.5)
    assert refused.value.param == "presence_penalty"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", prompt="a", max_tokens=1024)
    assert refused.value.code == "context_length_exceeded"
    assert "max_tokens of 1,023 would fit" in refused.value.message


def test_logits_that_are_not_finite_fail_one_request(client):
    with pytest.raises(openai.InternalServerError, match="not finite"):
        ask(client, "not finite")
    with pytest.raises(openai.InternalServerError, match="not finite"):  # nothing was sent yet, so it is a status
        [*ask(client, "not finite", stream=True)]
    seen = []
    with pytest.raises(openai.APIError, match="not finite"):
        seen += [chunk for chunk in ask(client, "late not finite", stream=True)]
    assert ask(client, "plain").choices[0].message.content == "The answer is 42."
