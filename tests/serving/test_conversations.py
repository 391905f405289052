"""How much of a conversation's prompts is in pages already: the table in docs/decoding.md, computed."""

import random
import re
from pathlib import Path

import pytest

from kimi_jax.chat import render
from kimi_jax.serving.prefix import PrefixTree, page_key
from kimi_jax.tokenizer import Tokenizer

PAGE = 64
WORDS = (
    "fox",
    "forest",
    "coin",
    "river",
    "stone",
    "garden",
    "letter",
    "window",
    "candle",
    "market",
    "winter",
    "basket",
)
PAGES = Path(__file__).parents[2] / "docs" / "decoding.md"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(Path(__file__).parents[1] / "data" / "tiny_random")


class Conversation:
    """Messages that grow, and the share of their prompts' tokens that pages hold when each is asked."""

    def __init__(self, tokenizer, preserve: bool):
        self.tokenizer, self.preserve = tokenizer, preserve
        self.messages, self.prompt_tokens, self.reused_tokens = [], 0, 0
        self._tree, self._random = PrefixTree(10_000), random.Random(0)

    def words(self, tokens: int) -> str:
        text = ""
        while len(self.tokenizer.encode(text)) < tokens:
            text += f"{self._random.choice(WORDS)} "
        return text.strip()

    def render(self, messages, **options):
        return render(messages, self.tokenizer, **options)

    def answer(self, **message) -> None:
        """The assistant's message, written behind the prompt of all before it."""
        prompt = self.render(self.messages, preserve_thinking=self.preserve)
        self.prompt_tokens += len(prompt)
        held = self._tree.find(self._keys(prompt[:-1]))
        self.reused_tokens += PAGE * len(held)
        before = self.messages
        self.messages = [*before, {"role": "assistant", **message}]
        asked, told = self.render(before, preserve_thinking=True), {"preserve_thinking": True}
        whole = self.render(self.messages, add_generation_prompt=False, **told)
        assert whole[: len(asked)] == asked
        keys = self._keys([*prompt, *whole[len(asked) :]][:-1])
        self._tree.pool.share(held)
        pages = [*held, *self._tree.pool.allocate(len(keys) - len(held))]
        self._tree.add(keys, pages, None, len(held))
        self._tree.pool.release(pages)

    def _keys(self, ids):
        return [page_key(ids[start : start + PAGE]) for start in range(0, len(ids) - PAGE + 1, PAGE)]

    @property
    def share(self) -> float:
        return self.reused_tokens / self.prompt_tokens


def chat(conversation: Conversation, turns: int = 8) -> None:
    for _ in range(turns):
        conversation.messages.append({"role": "user", "content": conversation.words(100)})
        conversation.answer(content=conversation.words(200), reasoning_content=conversation.words(400))


def agent(conversation: Conversation, questions: int = 2, calls: int = 8) -> None:
    for _ in range(questions):
        conversation.messages.append({"role": "user", "content": conversation.words(100)})
        for number in range(calls):
            call = {"id": f"functions.read:{number}", "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a"}'}}  # fmt: skip
            conversation.answer(content="", reasoning_content=conversation.words(100), tool_calls=[call])
            told = {"role": "tool", "tool_call_id": call["id"], "content": conversation.words(300)}
            conversation.messages.append(told)
        conversation.answer(content=conversation.words(200), reasoning_content=conversation.words(400))


def test_the_pages_table_is_what_conversations_reuse(tokenizer):
    table = dict(re.findall(r"^\| ([^|]+?) \| ([\d %|]+?) \|$", PAGES.read_text(), re.M))
    for name, run in (("chat", chat), ("agent", agent)):
        cells = next(cells for row, cells in table.items() if row.startswith(name))
        both = [Conversation(tokenizer, preserve) for preserve in (True, False)]
        for each in both:
            run(each)
        assert cells == " | ".join(f"{each.share:.0%}".replace("%", " %") for each in both), name


def test_dropped_thinking_is_where_pages_part(tokenizer):
    """The next turn's prompt is the last one's up to its thinking, in whole pages, and nothing of the answer."""
    conversation = Conversation(tokenizer, preserve=False)
    chat(conversation, turns=1)
    first = conversation.prompt_tokens
    conversation.messages.append({"role": "user", "content": "And?"})
    conversation.answer(content="No.")
    assert conversation.reused_tokens == (first - 1) // PAGE * PAGE
