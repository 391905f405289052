"""What a generation takes where nothing is asked for: the checkpoint's own advice, or the project's."""

from pathlib import Path
from typing import Any

from kimi_jax.text_files import read_json

THINKING_TOKENS, TOKENS = 4096, 512
"""New tokens at most where the model thinks before it answers, and where it does not."""

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")


def new_tokens(thinking: bool, positions: int, longest_prompt: int) -> int:
    """New tokens at most, by default: as many as an answer may want, or as the model has positions for.

    Args:
      thinking: whether the model thinks before it answers.
      positions: those of the model.
      longest_prompt: tokens of the longest prompt.
    """
    return max(1, min(THINKING_TOKENS if thinking else TOKENS, positions - longest_prompt))


def sampling_fields(checkpoint: Path) -> dict[str, float]:
    """What the checkpoint's generation_config.json says of sampling, as fields of `Sampling`; empty where it is silent.

    `do_sample: false` is greedy, whatever stands beside it. Fields that this project does not sample by are left alone:
    they describe other programs' beams and penalties.

    Raises:
      TextError, ValueError: the file is no JSON object, or the field that is named is no number.
    """
    file = checkpoint / "generation_config.json"
    if not file.is_file():
        return {}
    said: Any = read_json(file)
    if not isinstance(said, dict):
        raise ValueError(f"{file}: expected a JSON object")
    if said.get("do_sample") is False:
        return {"temperature": 0.0}
    fields = {name: said[name] for name in SAMPLING_FIELDS if said.get(name) is not None}
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{file}: {name} is {value!r}; it must be a number")
    return fields
