"""A run that is killed and resumed ends on the same bits as one that never stopped."""

import dataclasses
import json

import jax
import pytest
from rich.console import Console

from kimi_jax.training.loop import LoopOptions, ResumeError, plot, sparkline
from kimi_jax.training.recipes import BatchShape, TargetRun
from kimi_jax.training.target import TargetRecipe
from meshes.presets import Layout

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 64,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
RUN = TargetRun(TargetRecipe(steps=6, warmup_steps=2), BatchShape(2, 96, 64), seed=3, sizes=SIZES)


def options(**changes):
    return LoopOptions(log_every=1, evaluate_every=3, checkpoint_every=2, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, RUN.train(directory, Layout(), options(), evaluation_prompts=2)


def figures(log):
    return [{name: value for name, value in record.items() if name != "seconds_per_step"} for record in log]


@pytest.mark.parametrize("killed_at", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_resumed_run_is_bit_identical(whole, tmp_path, killed_at):
    """Killed in the middle of a step: what was saved last is where the next run begins."""

    class Killed(Exception):
        pass

    _, expected = whole
    with pytest.MonkeyPatch.context() as patch:
        from kimi_jax.training import data

        made = data.training_batch

        def batch(tokenizer, seed, step, **shape):
            if step == killed_at:
                raise Killed
            return made(tokenizer, seed, step, **shape)

        patch.setattr(data, "training_batch", batch)
        with pytest.raises(Killed):
            RUN.train(tmp_path, Layout(), options(), 2)
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text() + json.dumps({"step": 5, "loss": -1.0}) + '\n{"step": 6, "lo')  # lost, then cut off
    resumed = RUN.train(tmp_path, Layout(), options(), 2)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(expected.state), jax.tree.leaves(resumed.state), strict=True
    ):
        assert a.dtype == b.dtype
        assert (a == b).all(), jax.tree_util.keystr(path)
    assert figures(resumed.log) == figures(expected.log)
    assert [record["step"] for record in resumed.log] == [1, 2, 3, 4, 5, 6]
    assert figures([json.loads(line) for line in log.read_text().splitlines()]) == figures(expected.log)


def test_a_directory_of_another_run_is_refused(whole):
    directory, _ = whole
    with pytest.raises(ResumeError, match="seed 3 there, 5 now"):
        dataclasses.replace(RUN, seed=5).train(directory, Layout(), options(), 0)


def test_a_stopped_run_says_where_it_is(whole, tmp_path):
    """`stop_after` saves; another seed makes another model."""
    stopped = dataclasses.replace(RUN, seed=4).train(tmp_path, Layout(), options(stop_after=1), 0)
    assert int(stopped.state.step) == 1
    again = dataclasses.replace(RUN, seed=4).train(tmp_path, Layout(), options(stop_after=1), 0)
    weight, other = (run.state.parameters["lm_head"]["weight"] for run in (stopped, again))
    assert (weight == other).all()
    assert not (weight == whole[1].state.parameters["lm_head"]["weight"]).all()


def test_a_finished_run_trains_no_further(whole):
    directory, expected = whole
    again = RUN.train(directory, Layout(), options(), 0)
    assert int(again.state.step) == 6
    assert (again.state.parameters["lm_head"]["weight"] == expected.state.parameters["lm_head"]["weight"]).all()


def test_sparkline_and_plot(tmp_path):
    assert sparkline([1.0, 2.0, 3.0, 8.0]) == "▁▂▃█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([0.0] * 50 + [1.0] * 50, width=2) == "▁█"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="matplotlib"):
            plot([{"step": 1, "loss": 1.0}], ["loss"], tmp_path / "loss.png")
    else:
        plot([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}], ["loss"], tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_progress_goes_to_the_console(tmp_path):
    from kimi_jax.training.loop import run

    console = Console(record=True, width=200)
    state = {"step": jax.numpy.int32(0)}
    run(state, lambda s, b: ({"step": s["step"] + 1}, {"loss": jax.numpy.float32(b)}), float, 3, tmp_path, {},
        LoopOptions(log_every=1), None, console)  # fmt: skip
    text = console.export_text()
    assert "loss 2" in text
    assert "3/3" in text
