"""The package's names, and the example of its docstring run as it stands."""

import textwrap

import pytest

import kimi_jax


def test_the_example_of_the_docstring(capsys):
    example = kimi_jax.__doc__.split("checkpoint:\n\n", 1)[1].rsplit("\n\n", 1)[0]
    exec(compile(textwrap.dedent(example), "kimi_jax docstring", "exec"), {})
    assert "so 871" in capsys.readouterr().out


@pytest.mark.parametrize("name", kimi_jax.__all__)
def test_every_public_name_exists(name):
    assert getattr(kimi_jax, name) is getattr(__import__(kimi_jax._HOMES[name], fromlist=[name]), name)


def test_other_names_do_not():
    name = "decode"
    with pytest.raises(AttributeError, match="has no attribute 'decode'"):
        getattr(kimi_jax, name)
