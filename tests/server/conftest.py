import pytest

from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(BUNDLED_CHECKPOINT)


@pytest.fixture(scope="session")
def ids(tokenizer):
    """Ids of a text in which names of control tokens are these tokens."""
    return lambda text: tokenizer.encode(text, allow_special=True)
