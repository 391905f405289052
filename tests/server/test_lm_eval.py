"""lm-eval's own clients against the server: the scores of the project's tasks are those of the adapter.

uv run --group evaluation pytest -m slow tests/server/test_lm_eval.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kimi_jax
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.server.start import Serving, app_on
from tests.server.scripted import running

pytest.importorskip("lm_eval", reason="lm-eval is in the dependency group `evaluation`")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    engine = kimi_jax.load()
    serving = Serving("small", 8, draft=kimi_jax.Draft("ddtree", 7), warm_up="none", thinking=False, waiting=256)
    with running(app_on(engine, BUNDLED_CHECKPOINT, serving)) as running_server:
        yield running_server


def results(folder):
    (file,) = folder.rglob("results*.json")
    samples = {}
    for path in folder.rglob("samples*.jsonl"):
        name = path.name.removeprefix("samples_").rpartition("_")[0]
        samples[name] = [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(file.read_text())["results"], samples


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory):
    """Runs lm-eval on the project's tasks, from the project's folder."""

    def run(module, kind, tasks, *flags, **arguments):
        folder = tmp_path_factory.mktemp(kind)
        pairs = ",".join(f"{name}={value}" for name, value in arguments.items())
        command = [sys.executable, "-m", module, "--model", kind, "--model_args", pairs, "--tasks", tasks]
        command += ["--include_path", "docs/data/lm_eval", "--log_samples", *flags]
        done = subprocess.run(
            [*command, "--output_path", folder], cwd=ROOT, capture_output=True, text=True, check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OPENAI_API_KEY": "EMPTY"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return results(folder)

    return run


TASKS = "kimi_answers,kimi_choices,kimi_stories"


@pytest.fixture(scope="module")
def direct(lm_eval):
    return lm_eval("kimi_jax.evaluation.lm_eval", "kimi_jax", TASKS, speculation="none")


def test_lm_eval_scores_the_same_through_the_server(server, lm_eval, direct):
    url = f"{server.url}/v1/completions"
    arguments = {
        "base_url": url,
        "model": "small",
        "num_concurrent": 4,
        "max_length": 1024,
        "tokenizer_backend": "remote",
    }
    found, samples = lm_eval("lm_eval", "local-completions", TASKS, **arguments)
    expected, own = direct
    for task, metric in (("kimi_answers", "exact_match"), ("kimi_choices", "acc")):
        assert found[task][f"{metric},none"] == expected[task][f"{metric},none"]
    assert found["kimi_stories"]["bits_per_byte,none"] == pytest.approx(
        expected["kimi_stories"]["bits_per_byte,none"], abs=1e-5
    )
    assert [each["resps"] for each in samples["kimi_answers"]] == [each["resps"] for each in own["kimi_answers"]]
    for task in ("kimi_choices", "kimi_stories"):
        mine, theirs = ({each["doc_id"]: each["resps"] for each in some[task]} for some in (samples, own))
        assert mine.keys() == theirs.keys()
        for doc, answers in mine.items():
            told, wanted = (np.array(some, object).reshape(-1).tolist() for some in (answers, theirs[doc]))
            assert len(told) == len(wanted)
            for one, other in zip(told, wanted, strict=True):
                if isinstance(one, bool) or str(one) in ("True", "False"):
                    assert str(one) == str(other)
                else:
                    assert float(one) == pytest.approx(float(other), abs=1e-4)


def test_lm_eval_chats_through_the_server(server, lm_eval):
    arguments = {"base_url": f"{server.url}/v1/chat/completions", "model": "small", "num_concurrent": 4}
    found, _ = lm_eval("lm_eval", "local-chat-completions", "kimi_answers", "--apply_chat_template", **arguments)
    assert found["kimi_answers"]["exact_match,none"] == 1, "as docs/evaluation.md has it of the adapter"
