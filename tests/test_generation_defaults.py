"""What a checkpoint advises, and how many tokens an answer may have."""

import pytest

from kimi_jax.generation_defaults import new_tokens, sampling_fields


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"temperature": 0.6, "top_p": 0.95, "eos_token_id": 1}', {"temperature": 0.6, "top_p": 0.95}),
        ('{"do_sample": true, "temperature": 1, "top_k": 50, "min_p": null}', {"temperature": 1, "top_k": 50}),
        ('{"do_sample": false, "temperature": 0.6}', {"temperature": 0.0}),
        ('{"max_length": 262144, "eos_token_id": 163586}', {}),  # K2.6's own file
    ],
)
def test_the_checkpoint_s_advice(text, fields, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    assert sampling_fields(tmp_path) == fields


def test_no_file_is_no_advice(tmp_path):
    assert sampling_fields(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "expected a JSON object"), ('{"top_p": "1"}', "top_p is '1'"),
     ('{"top_k": true}', "top_k is True")],
)  # fmt: skip
def test_a_broken_file_is_refused_by_name(text, message, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
        sampling_fields(tmp_path)


def test_answers_with_thinking_have_more_room_and_none_passes_the_positions():
    assert new_tokens(True, 262_144, 100) == 4096
    assert new_tokens(False, 262_144, 100) == 512
    assert new_tokens(True, 1024, 24) == 1000
    assert new_tokens(False, 1024, 1024) == 1
