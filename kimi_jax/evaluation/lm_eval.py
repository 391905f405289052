"""A model for EleutherAI's lm-eval (`uv sync --group evaluation`).

lm-eval's command finds its models in a list of its own and has no way to add one from outside. This runs the same
command with `kimi_jax` in the list:

    python -m kimi_jax.evaluation.lm_eval --model kimi_jax --model_args checkpoint=DIR,mesh=nvl72 --tasks NAME …

`kimi_jax.evaluation.lm_eval:KimiJax` is the class for `lm_eval.simple_evaluate(model=KimiJax(…))`.
"""

import dataclasses
import difflib
import functools
import random
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import simple_parse_args_string  # pyright: ignore[reportMissingImports]
from rich.console import Console
from tqdm import tqdm

from kimi_jax.chat import render
from kimi_jax.commands.errors import errors_in_one_line
from kimi_jax.commands.options import SpeculationOptions, flat, of_values
from kimi_jax.commands.progress import open_engine
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.provenance import provenance

if TYPE_CHECKING:
    from kimi_jax.decoding.scoring import Scores

KNOWN = {"until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens", "do_sample", "temperature",
         "top_k", "top_p", "min_p"}  # fmt: skip
"""What `generation_kwargs` of a task may say."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the number of new tokens, the first that is given counts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(SpeculationOptions):
    """What lm-eval's `--model_args` may say: decode's options of checkpoint, layout and speculation, and these."""

    thinking: bool = False
    """Let the model think in chats; what it thinks is no part of its answer."""
    max_length: int | None = None
    """Tokens of context for a log-likelihood; by default the model's positions."""
    max_gen_toks: int = 256
    """New tokens of tasks that do not say how many."""
    batch_size: int | str = "auto"
    """Requests run together; auto is 8 for each of the mesh's dp × ep groups."""
    seed: int = 0
    """For tasks that sample; where lm-eval makes the model by name it follows from lm-eval's own --seed."""
    max_batch_size: int | None = None
    """lm-eval passes it; batches have one size."""
    device: str | None = None
    """lm-eval passes it; the mesh says the devices."""


class KimiJax(TemplateLM):
    """A Kimi K2.6 checkpoint on a mesh.

    Prompts are parsed as lm-eval's `hf` model does: the name of a control token in a text becomes that token.
    """

    def __init__(self, **arguments: Any):
        """Loads the checkpoint; the arguments are the fields of `Arguments`.

        Raises:
          ValueError: naming the argument, file or option that does not fit.
        """
        super().__init__()
        given = {name: value for name, value in arguments.items() if value is not None}
        options, console = of_values(Arguments, checked(given)), Console(stderr=True)
        drafter = options.used_drafter(console)
        self._opened = open_engine(options, console, drafter)
        self.engine, self.draft = self._opened.engine, options.draft(drafter)
        self.thinking, self.seed, self.max_gen_toks = options.thinking, options.seed, options.max_gen_toks
        self._name = options.checkpoint.name
        self._scored_tokens = self._reused_tokens = 0
        groups = self.engine.mesh.shape["dp"] * self.engine.mesh.shape["ep"]
        automatic = str(options.batch_size).startswith("auto")
        self.batch_size = 8 * groups if automatic else int(options.batch_size)
        positions = self.engine.config.max_position_embeddings
        self.max_length = options.max_length or positions
        if self.batch_size < 1 or not 1 <= self.max_length <= positions:
            raise ValueError(
                f"batch_size {self.batch_size} and max_length {self.max_length}: the latter is at most {positions}"
            )

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> "KimiJax":
        """The model of `--model_args`.

        Raises:
          ValueError: as `create_from_arg_obj`.
        """
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "KimiJax":
        """The model of named arguments; without `seed` it draws one from what lm-eval's own seed makes of `random`.

        Raises:
          ValueError: naming the argument that there is not, or whose value does not fit, and what does.
        """
        drawing = random.Random()
        drawing.setstate(random.getstate())  # a copy: what lm-eval draws itself does not change
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        arguments: dict[str, Any] = {"seed": drawing.getrandbits(63)} | given | checked(arg_dict)
        return cls(**arguments)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's results keep of the model: everything needed to run it again."""
        run = provenance(self._opened, self.draft, self.seed)
        own = {"batch_size": self.batch_size, "max_length": self.max_length, "max_gen_toks": self.max_gen_toks,
               "thinking": self.thinking, "scored_tokens": self._scored_tokens,
               "reused_tokens": self._reused_tokens}  # fmt: skip
        return {"model_name": self._name, "run": run | own}

    def _count(self, tokens: int, scores: "Scores", bar: tqdm) -> None:
        """Counts the rows of a window, and shows how many were not run because an earlier one begins alike."""
        self._scored_tokens += tokens
        self._reused_tokens += scores.reused
        bar.set_postfix_str(f"{self._reused_tokens:,} of {self._scored_tokens:,} tokens reused", refresh=False)

    @property
    def eot_token_id(self) -> int:
        """Ends a turn."""
        return self.engine.tokenizer.special_id("<|im_end|>")

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without context."""
        return self.engine.tokenizer.special_id("[BOS]")

    @property
    def tokenizer_name(self) -> str:
        """Part of the name of lm-eval's cache of requests, which depend on the template."""
        return f"{self._name}{'-thinking' if self.thinking else ''}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; none are added to it."""
        return self.engine.tokenizer.encode(string, allow_special=True)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """What the log says of the template.

        Raises:
          ValueError: where another one is asked for by name.
        """
        if isinstance(chat_template, str):
            raise ValueError(f"there is no chat template {chat_template!r}: give --apply_chat_template without a name")
        return f"kimi_jax.chat.render(thinking={self.thinking})" if chat_template else ""

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without the generation prompt its last message is left open, to be continued."""
        ids = render(
            chat_history, self.engine.tokenizer, thinking=self.thinking, add_generation_prompt=add_generation_prompt
        )
        return self.engine.tokenizer.decode(ids if add_generation_prompt else ids[:-1])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        from kimi_jax.decoding.scoring import Window
        from kimi_jax.evaluation.batches import score_all

        windows = []
        for (context, continuation), before, after in requests:
            if not after or len(after) > self.max_length:
                raise ValueError(
                    f"{continuation[:80]!r} after {context[-80:]!r} has {len(after)} tokens of its own; it must have "
                    f"1 to {self.max_length}"
                )
            windows.append(Window((before + after)[:-1][-self.max_length :], after))
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(total=len(requests), desc="log-likelihoods", disable=disable_tqdm) as bar:
            for indices, scores in score_all(self.engine, windows, self.batch_size):
                self._count(len(windows[indices[0]].inputs), scores, bar)
                result = float(scores.logprobs.sum(dtype="float64")), bool(scores.greedy.all())
                for index in indices:
                    results[index] = result
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], result)
                bar.update(len(indices))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts behind [BOS], in windows of `max_length` tokens that do not overlap."""
        from kimi_jax.decoding.scoring import strided
        from kimi_jax.evaluation.batches import score_all

        parts = []
        for number, request in enumerate(requests):
            ids = [self.prefix_token_id, *self.tok_encode(request.args[0])]
            parts += [(number, window) for window in strided(ids, self.max_length, self.max_length)]
        totals, left = [0.0] * len(requests), [0] * len(requests)
        for number, _ in parts:
            left[number] += 1
        with tqdm(total=len(parts), desc="log-likelihoods of texts", disable=disable_tqdm) as bar:
            for indices, scores in score_all(self.engine, [window for _, window in parts], self.batch_size):
                self._count(len(parts[indices[0]][1].inputs), scores, bar)
                for index in indices:
                    number = parts[index][0]
                    totals[number] += float(scores.logprobs.sum(dtype="float64"))
                    left[number] -= 1
                    if not left[number]:
                        self.cache_hook.add_partial("loglikelihood_rolling", requests[number].args, totals[number])
                bar.update(len(indices))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, the end of the model's turn or the limit of tokens.

        Raises:
          ValueError: a task's `generation_kwargs` that this does not know.
        """
        from kimi_jax.evaluation.batches import write_all

        groups: dict[Any, list[int]] = {}
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        for index, request in enumerate(requests):
            groups.setdefault(self._writing(request.args[0], request.args[1]), []).append(index)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="texts", disable=disable_tqdm) as bar:
            for writing, indices in groups.items():
                asked = [prompts[index] for index in indices]
                for place, text in write_all(
                    self.engine, asked, writing, batch=self.batch_size, draft=self.draft, seed=self.seed
                ):
                    request = requests[indices[place]]
                    texts[indices[place]] = text
                    if writing.sampling.greedy:
                        self.cache_hook.add_partial("generate_until", request.args, text)
                    bar.update(1)
        return texts

    @functools.cached_property
    def _turn(self) -> str:
        """How a prompt ends whose answer is the assistant's."""
        ids = render([{"role": "user", "content": ""}], self.engine.tokenizer, thinking=self.thinking)
        return self.engine.tokenizer.decode(ids).rpartition("<|im_end|>")[2]

    def _writing(self, prompt: str, wanted: Mapping[str, Any]) -> Any:
        from kimi_jax.decoding.sampling import Sampling
        from kimi_jax.evaluation.batches import Writing

        if unknown := sorted(wanted.keys() - KNOWN):
            raise ValueError(
                f"generation_kwargs says {unknown[0]}, which is not known; known: {', '.join(sorted(KNOWN))}"
            )
        stops = wanted.get("until") or []
        length = next((wanted[name] for name in LENGTHS if wanted.get(name) is not None), self.max_gen_toks)
        temperature = float(wanted.get("temperature") or 0.0) if wanted.get("do_sample", True) else 0.0
        sampling = Sampling() if not temperature else Sampling(
            temperature,
            int(wanted.get("top_k") or 0),
            float(wanted.get("top_p") or 1.0),
            float(wanted.get("min_p") or 0.0),
        )  # fmt: skip
        chat = prompt.endswith(self._turn)
        return Writing(
            (stops,) if isinstance(stops, str) else tuple(stops), int(length), sampling, chat, chat and self.thinking
        )


def checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `KimiJax` as lm-eval parses them: what it took for numbers and None is turned back where it is text.

    Raises:
      ValueError: naming the argument that there is not, or whose value does not fit, and what does.
    """
    hints = flat(Arguments)
    names = list(hints)
    found = {}
    for name, value in arguments.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"--model_args: there is no argument {name!r}; {meant}")
        kinds = _kinds(hints[name])
        if value is None and "none" in kinds:
            value = "none"  # speculation=none, which is not to leave speculation out
        if isinstance(value, Path):
            value = str(value)
        if str in kinds and isinstance(value, int | float) and type(value) not in kinds:
            value = str(value)
        if type(value) not in kinds and value not in [kind for kind in kinds if isinstance(kind, str)]:
            words = {int: "a whole number", bool: "True or False", str: "text"}
            fits = " or ".join(str(words.get(kind, kind)) for kind in kinds if kind is not types.NoneType)
            raise ValueError(f"--model_args: {name}={value} does not fit; {name} takes {fits}")
        if value == "" and str in kinds:
            raise ValueError(f"--model_args: {name} has no value; arguments are NAME=VALUE, separated by commas")
        found[name] = value
    return found


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows, and the values of its literals."""
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(kind for part in get_args(hint) for kind in _kinds(part))
    return get_args(hint) if get_origin(hint) is Literal else (str if hint is Path else hint,)


def main() -> None:
    """lm-eval's own command, with `kimi_jax` among its models."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker  # pyright: ignore[reportMissingImports]

    register_model("kimi_jax")(cast(Any, KimiJax))
    # lm-eval names folders of results by model_args of its own models, and at random where it finds none of them.
    GeneralConfigTracker._get_model_name = staticmethod(_model_name)
    with errors_in_one_line(Console(stderr=True)):
        cli_evaluate()


def _model_name(model_args: str | Mapping[str, Any] | None) -> str:
    """The checkpoint's name."""
    arguments = simple_parse_args_string(model_args) if isinstance(model_args, str) else model_args or {}
    return Path(str(arguments.get("checkpoint", BUNDLED_CHECKPOINT))).name


if __name__ == "__main__":
    main()
