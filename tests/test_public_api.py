"""The package's names, and the example of its docstring run as it stands."""

import textwrap

import numpy as np
import pytest

import kimi_jax


def test_the_example_of_the_docstring(capsys):
    example = "\n".join(line for line in kimi_jax.__doc__.splitlines() if line.startswith("    ") or not line)
    names = {}
    exec(compile(textwrap.dedent(example), "kimi_jax docstring", "exec"), names)
    printed = capsys.readouterr().out
    assert "so 871\nOnce there was a fox named Mila." in printed
    assert "<|im_end|>" not in printed
    engine, logits = names["engine"], names["logits"]
    assert logits.shape == (len(engine.tokenizer.encode("Add 612 and 259.")), engine.config.vocab_size)
    assert logits.dtype == np.float32
    # The same engine: what it wrote is what its logits say.
    answer = engine.chat("Add 612 and 259.", thinking=False)
    assert answer.finish_reason == "stop"
    text = [*answer.prompt_ids, *answer.token_ids]
    greedy = engine.logits(text)[len(answer.prompt_ids) - 1 : -1].argmax(-1)
    assert greedy.tolist() == answer.token_ids
    stopped = engine.chat("Add 612 and 259.", thinking=False, stop=["=07"])
    assert stopped.text == "2+9+0=11, 1+5+1"
    assert stopped.finish_reason == "stop"


def test_logits_of_a_sequence(engines, reference):
    for ids, expected in zip(reference["input_ids"][:2], reference["logits"], strict=False):
        np.testing.assert_allclose(engines().logits(ids.tolist()), expected, atol=1e-4)


def test_the_public_names_are_what_completion_offers():
    assert dir(kimi_jax) == sorted(kimi_jax.__all__)


@pytest.mark.parametrize("name", kimi_jax.__all__)
def test_every_public_name_exists(name):
    assert getattr(kimi_jax, name) is getattr(__import__(kimi_jax._HOMES[name], fromlist=[name]), name)


def test_other_names_do_not():
    name = "decode"
    with pytest.raises(AttributeError, match="has no attribute 'decode'"):
        getattr(kimi_jax, name)
