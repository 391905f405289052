import numpy as np
import pytest

from kimi_jax.training import data
from kimi_jax.training.data import Chat


def test_packed_chats_are_whole_and_apart(tokenizer):
    batch = data.training_batch(tokenizer, 0, 5, sequences=3, length=128, answers=80)
    again = data.training_batch(tokenizer, 0, 5, sequences=3, length=128, answers=80)
    other = data.training_batch(tokenizer, 0, 6, sequences=3, length=128, answers=80)
    assert (batch.tokens == again.tokens).all()
    assert not (batch.tokens == other.tokens).all()
    documents, positions = np.asarray(batch.documents), np.asarray(batch.positions)
    assert (documents > 0).mean() > 0.8
    for row in range(3):
        for document in range(1, documents[row].max() + 1):
            where = np.flatnonzero(documents[row] == document)
            assert (np.diff(where) == 1).all()
            assert (positions[row, where] == np.arange(len(where))).all()
            start = tokenizer.decode(np.asarray(batch.tokens)[row, where[:3]].tolist())
            assert start == "<|im_user|>user<|im_middle|>"


def test_rows_see_their_own_chat_up_to_themselves(tokenizer):
    batch = data.training_batch(tokenizer, 0, 1, sequences=2, length=96, answers=60)
    ancestors, documents = np.asarray(batch.rows().ancestors), np.asarray(batch.documents)
    for row in range(2):
        for i in range(96):
            for j in range(96):
                expected = documents[row, i] > 0 and documents[row, i] == documents[row, j] and j <= i
                assert ancestors[row, i, j] == expected


def test_targets_spell_the_answers(tokenizer):
    """Reading the targets in order gives each chat from </think> to <|im_end|>, and they follow their predictors."""
    batch = data.training_batch(tokenizer, 0, 2, sequences=2, length=128, answers=80)
    for row in range(2):
        real = np.asarray(batch.weights)[row] > 0
        text = tokenizer.decode(np.asarray(batch.targets)[row, real].tolist())
        assert text.startswith("</think>")
        assert text.endswith("<|im_end|>")
        assert text.count("</think>") == text.count("<|im_end|>") == np.asarray(batch.documents)[row].max()
        predictors = np.asarray(batch.predictors)[row, real]
        tokens, targets = np.asarray(batch.tokens)[row], np.asarray(batch.targets)[row, real]
        inside = targets != tokenizer.special_id("<|im_end|>")
        assert (tokens[predictors[inside] + 1] == targets[inside]).all()
        assert tokenizer.decode([int(tokens[predictors[0]])]) == "<think>"


def test_a_chat_that_never_fits_is_an_error():
    with pytest.raises(ValueError, match="exceeds sequences of 8/8"):
        data.pack([Chat(list(range(10)), 4)], 2, 8, 8)
