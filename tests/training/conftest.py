import jax
import pytest

from kimi_jax.training import small
from kimi_jax.training.vocabulary import write_small_tokenizer

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return write_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tiny_config(tokenizer):
    return small.config(tokenizer, **TINY)


def assert_trees_equal(a, b):
    """Bit for bit."""
    paths = jax.tree_util.tree_leaves_with_path(a)
    others = jax.tree.leaves(b)
    assert len(paths) == len(others)
    for (path, left), right in zip(paths, others, strict=True):
        assert (left == right).all(), jax.tree_util.keystr(path)
