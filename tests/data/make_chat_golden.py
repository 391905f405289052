"""Make chat_golden.json: token ids of chats and texts from public reference implementations of Kimi's format.

The references are files of other projects, given by path and never copied into this repository:

* `--tokenization`: Moonshot's tokenization_kimi.py (the copy in troy12x/quasar-kimi, commit 6213f24e).
* `--template`: K2.5's chat template with K2.6's `preserve_thinking` (radixark/miles, commit 31f1ca96,
  miles/utils/chat_template_utils/templates/kimi_k25_fixed.jinja). K2.6's own template is not in a public repository;
  thinking-machines-lab/tinker-cookbook pull request 675 compared the two and found this flag to be the difference.
* `--tool-declaration`: Moonshot's TypeScript encoder (thinking-machines-lab/tinker-cookbook, commit 9dfcc3a2,
  tinker_cookbook/renderers/kimi_k2_5_tool_declaration_ts.py).

Needs transformers 4.57, tiktoken and jinja2; no part of kimi_jax is used.

    python make_chat_golden.py --tokenization F --template F --tool-declaration F > chat_golden.json
"""

import argparse
import base64
import hashlib
import importlib.util
import itertools
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

SAMPLE = (
    "The user asks the assistant for the weather in the city of the other user. assistant system user tool functions"
    " functions.get_weather:0 ## Return of functions.get_weather:0\n\n## Return of functions.f:1\n\n\n\n    return"
    " namespace functions type string number hello world hello hello's it's we'll 123 1234567 123 abababab ab ab ab"
    ' 中文 你好 中文 你好 カタカナー <|im_end|> <|im_user|> <think></think> "a": "b", "c": {}  ,  .  //  //'
)
SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "hello world"}
CALL = {
    "id": "functions.get_weather:0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "中文"}'},
}
RESULT = {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "sunny, 12 degrees"}
CALLING = {"role": "assistant", "content": "", "reasoning_content": "I must ask the tool.", "tool_calls": [CALL]}
ANSWER = {"role": "assistant", "content": "It is sunny.", "reasoning_content": "The tool said sunny."}


def function(name, parameters, description=None):
    body = {"name": name, "parameters": parameters}
    return {"type": "function", "function": body | ({"description": description} if description else {})}


WEATHER = function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "city": {"type": "string", "description": "The city.\n\nIn any language.", "minLength": 1, "maxLength": 80},
        },
        "required": ["city"],
    },
    "Weather of a city",
)
SCHEMAS = {
    "no parameters": function("f", {}),
    "empty object": function("f", {"type": "object", "properties": {}}, "Does\nnothing"),
    "scalars": function(
        "f",
        {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 9, "default": 3},
                "x": {"type": "number", "default": 0.5},
                "b": {"type": "boolean", "default": True, "description": "a flag"},
                "s": {"type": "string", "pattern": "^a+$", "default": "é"},
                "z": {"type": "null"},
                "any": {},
                "yes": True,
            },
            "required": ["x", "n"],
        },
    ),
    "unions and enums": function(
        "f",
        {
            "type": "object",
            "properties": {
                "u": {"type": ["string", "null", "integer"], "description": "mixed"},
                "e": {"enum": ["a", 1, None, True]},
                "o": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}], "default": [1]},
                "m": {"type": ["string", "null"], "enum": ["a", None]},
            },
        },
    ),
    "nested": function(
        "f",
        {
            "type": "object",
            "properties": {
                "list": {"type": "array", "minItems": 1, "items": {"type": "string", "description": "an item"}},
                "plain": {"type": "array"},
                "object": {
                    "type": "object",
                    "description": "inner",
                    "properties": {"deep": {"type": "array", "items": {"type": "object", "properties": {"k": {}}}}},
                    "required": ["deep"],
                    "additionalProperties": False,
                },
                "map": {"type": "object", "additionalProperties": {"type": "integer"}},
            },
            "additionalProperties": True,
        },
    ),
    "definitions": function(
        "f",
        {
            "$defs": {
                "Point": {"type": "object", "description": "A point", "properties": {"x": {"type": "number"}}},
                "Color": {"type": "string", "enum": ["red", "blue"]},
            },
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/Point", "description": "where"}, "color": {"$ref": "#/$defs/Color"}},
            "required": ["color"],
        },
    ),
    "self reference": function(
        "f",
        {
            "type": "object",
            "properties": {"next": {"$ref": "#"}, "a": {"type": "string"}, "value": {"type": "integer"}},
            "required": ["value"],
        },
    ),
    "no typescript form": function("f", {"type": "object", "properties": {"x": {"oneOf": [{"type": "string"}]}}}),
    "dangling reference": function("f", {"type": "object", "properties": {"x": {"$ref": "#/$defs/Nowhere"}}}),
    "enum of the wrong type": function(
        "f", {"type": "object", "properties": {"x": {"type": "integer", "enum": ["a"]}}}
    ),
}

PARTS = {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}
CASES = [
    ("user", [USER], {}),
    ("instant", [USER], {"thinking": False}),
    ("no generation prompt", [USER], {"add_generation_prompt": False}),
    ("system", [SYSTEM, USER], {}),
    ("text parts", [SYSTEM, PARTS], {}),
    ("empty content", [{"role": "user", "content": ""}, {"role": "user", "content": []}], {}),
    ("named", [USER | {"name": "alice"}, ANSWER | {"name": "kimi"}, USER], {}),
    ("history drops thinking", [SYSTEM, USER, ANSWER, USER], {}),
    ("history keeps thinking", [SYSTEM, USER, ANSWER, USER], {"preserve_thinking": True}),
    ("history, instant", [SYSTEM, USER, ANSWER, USER], {"thinking": False}),
    ("history keeps none, instant", [SYSTEM, USER, ANSWER, USER], {"thinking": False, "preserve_thinking": True}),
    ("answer last", [USER, ANSWER], {"add_generation_prompt": False}),
    ("tools", [SYSTEM, USER], {"tools": [WEATHER]}),
    ("tools without system", [USER], {"tools": [WEATHER, SCHEMAS["no parameters"]], "thinking": False}),
    ("call", [SYSTEM, USER, CALLING, RESULT], {"tools": [WEATHER]}),
    ("call, instant", [SYSTEM, USER, CALLING, RESULT], {"thinking": False}),
    ("call after an answer", [USER, ANSWER, USER, CALLING, RESULT], {}),
    ("answer after a call", [USER, CALLING, RESULT, ANSWER, USER], {}),
    ("answer after a call, kept", [USER, CALLING, RESULT, ANSWER, USER], {"preserve_thinking": True}),
    (
        "two calls, object arguments",
        [
            USER,
            {
                "role": "assistant",
                "content": "one moment",
                "tool_calls": [
                    CALL,
                    {"id": "functions.f:1", "function": {"name": "f", "arguments": {"b": "é", "a": [1, None]}}},
                ],
            },
            RESULT,
            {"role": "tool", "name": "f", "tool_call_id": "functions.f:1", "content": "\n\nseam"},
        ],
        {},
    ),
    ("call without content", [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT], {}),
    ("system in the middle", [USER, ANSWER, SYSTEM, USER], {}),
    ("multilingual", [{"role": "user", "content": "你好, the 中文 world's ーé 123456 \U0001f600\r\n\tend"}], {}),
]

TEXTS = [
    "",
    "hello world",
    "  hello   world  \n\n  the end \n",
    "你好hello中文 world你好's",
    "HELLO'S helloWORLD HelloWorld it'S we'LL",
    "１２３ 1234567 ½ ² ٣٤٥",
    "カタカナー ひらがな 々〆 한국어 العربية हिन्दी",
    "a\u0301e\u0308 \u00e9 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U00020000\U00020001",
    "\r\n\r\n \t\u3000\u00a0x\u2028y\u0085z\x1c\x1d",
    "!?…—«»\n\n//<|im_end|> [BOS] <think></think> <|reserved_token_5|>",
    'def f(x):\n    return {"a": x ** 2}  # comment\n',
    "wow!\nyes !\r\n!\n\n it'S IT'S x'Sx",
    "\x00\x7f\ufeff\ufffd",
]
# (unit, repeats) pairs joined: the cuts at 25,000 characters of one kind and at 400,000 characters fall inside units.
LONG_TEXTS = [
    [["a", 1], ["ab", 20_000]],
    [["x", 3], [" ", 30_001], ["ab", 3]],
    [["ab ", 140_000]],
    [["中文", 26_000], [" ", 1], ["123", 9_000]],
    [["ab", 12_500], [" ", 1], ["ab", 12_500], ["\n", 25_001]],
]


def base_tokens(merges=120):
    """The 256 bytes and the tokens of `merges` steps of byte-pair encoding trained on SAMPLE."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in word.encode()] for word in re.findall(r"\s?\w+|\s?[^\w\s]+|\s+", SAMPLE)]
    for _ in range(merges):
        pairs = Counter((left, right) for word in words for left, right in itertools.pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if best[0] + best[1] not in tokens:
            tokens.append(best[0] + best[1])
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1
    # Pairs that show where the split pattern cuts: contractions in capitals, line ends after punctuation.
    return [*tokens, b"T'", b"'S", b"!\n", b"\n!", b"\r\n", b" !"]


def load_module(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser()
    for option in ("--tokenization", "--template", "--tool-declaration"):
        parser.add_argument(option, type=Path, required=True)
    options = parser.parse_args()
    from transformers import AddedToken

    typescript = load_module(options.tool_declaration, "tool_declaration_ts").encode_tools_to_typescript_style
    reference = load_module(options.tokenization, "tokenization_kimi")
    tokens = base_tokens()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiktoken.model"
        model.write_bytes(b"".join(base64.b64encode(t) + f" {rank}\n".encode() for rank, t in enumerate(tokens)))
        tokenizer = reference.TikTokenTokenizer(
            str(model),
            unk_token="[UNK]",
            pad_token="[PAD]",
            added_tokens_decoder={len(tokens) + o: AddedToken(name, special=True) for o, name in SPECIALS.items()},
        )
    tokenizer.chat_template = options.template.read_text()

    def declare(tools):
        try:
            return typescript(reference.deep_sort_dict(tools))
        except Exception:  # as Moonshot's apply_chat_template does: the template then falls back to JSON
            return None

    def chat(name, messages, settings):
        tools = settings.get("tools")
        arguments = {"add_generation_prompt": True, "thinking": True, "preserve_thinking": False} | settings
        if tools and declare(tools):
            arguments["tools_ts_str"] = declare(tools)
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        return {"name": name, "messages": messages, "settings": settings, "text": text, "ids": tokenizer.encode(text)}

    def long(parts):
        ids = tokenizer.encode("".join(unit * times for unit, times in parts), allow_special_tokens=False)
        return {
            "parts": parts,
            "count": len(ids),
            "sha256": hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest(),
        }

    golden = {
        "made_by": "tests/data/make_chat_golden.py, which names the sources",
        "tokens": [token.hex() for token in tokens[256:]],
        "chats": [chat(*case) for case in CASES]
        + [chat(f"schema: {name}", [USER], {"tools": [tool]}) for name, tool in SCHEMAS.items()],
        "texts": [{"text": t, "ids": tokenizer.encode(t, allow_special_tokens=False)} for t in TEXTS],
        "texts_with_special": [{"text": t, "ids": tokenizer.encode(t)} for t in TEXTS],
        "long_texts": [long(parts) for parts in LONG_TEXTS],
    }
    json.dump(golden, sys.stdout, ensure_ascii=False, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
