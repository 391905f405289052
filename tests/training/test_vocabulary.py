import numpy as np

from kimi_jax.training.tasks import FAMILIES, training_stream
from kimi_jax.training.vocabulary import token_list, words


def test_template_words_are_single_tokens(tokenizer):
    for word in words():
        assert len(tokenizer.encode(word)) == 1, word


def test_the_word_list_covers_every_text(tokenizer):
    """No template word falls apart into letters: digits, marks and what stands in quotes are single characters."""
    stream = training_stream(np.random.default_rng(7))
    for _ in range(500):
        example = next(stream)
        for text in (example.prompt, example.answer):
            pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
            assert "".join(pieces) == text
            if example.family in ("story", "table", "date", "add", "unit", "sort"):
                assert not [p for p in pieces if len(p) == 1 and p.isalpha()], pieces


def test_edited_letters_are_single_tokens(tokenizer):
    rng = np.random.default_rng(0)
    for family in ("reverse", "upper", "count"):
        for _ in range(200):
            example = FAMILIES[family](rng)
            letters = example.answer.split(" ")[0]
            assert len(tokenizer.encode(letters)) == len(letters)


def test_size(tokenizer):
    assert tokenizer.vocab_size == 512 + len(token_list())
    assert tokenizer.vocab_size <= 960
