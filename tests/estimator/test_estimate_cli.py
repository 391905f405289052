import functools
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kimi_jax.commands import run
from kimi_jax.config import ModelConfig
from kimi_jax.estimator import search

SCRIPT = Path(__file__).parents[2] / "scripts" / "estimate.py"


@pytest.fixture
def main():
    return functools.partial(run, "estimate")


def test_point_as_json(main, capsys):
    main(["point", "--mesh", "hgx-ib-16", "--gpu", "h200", "--batch", "8", "--budget", "7", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["layout"] == "dp 1 × ep 2 × tp 8, experts by slots, allgather"
    assert data["tokens_per_s"] == pytest.approx(8 * data["tokens_per_s_per_user"])
    assert sum(part["ms"] for part in data["parts"].values()) == pytest.approx(data["step_ms"])
    assert data["limit_ms"] <= data["step_ms"]


def test_options_reach_the_estimate(main, capsys, tmp_path):
    def speed(*arguments: str) -> float:
        main(["point", "--mesh", "hgx-ib-16", "--batch", "64", "--json", *arguments])
        return json.loads(capsys.readouterr().out)["tokens_per_s_per_user"]

    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({"hit_rates": [0.5] * 7}))
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([1e6] * 8 + [1] * 376))
    base = speed()
    assert speed("--infiniband", "400") < base
    assert speed("--kernels", "target") > base
    assert speed("--overlap", "1") > base
    assert speed("--hit-rates", str(rates)) < base
    assert speed("--expert-counts", str(counts)) > base
    assert speed("--input-tokens", "8192") < base
    assert speed("--no-eplb") < base
    long = ("--context", "65536", "--dp", "2", "--ep", "1")
    assert speed(*long, "--cache", "split") > speed(*long)


def test_a_search_keeps_the_axes_that_are_given_and_chooses_the_others(main, capsys):
    main(["recommend", "--mesh", "nvl72", "--ep", "72", "--json"])
    assert "ep 72 × tp 1" in json.loads(capsys.readouterr().out)["best"]["layout"]


def test_table_shows_parts_limit_and_memory(main, capsys):
    main(["point", "--mesh", "local", "--gpu", "rtx-pro-6000", "--tp", "8", "--wide"])
    out = capsys.readouterr().out
    for word in ("attention", "reductions", "of limit", "latent cache", "Bottleneck: experts", "NCCL ring"):
        assert word in out


TABLES = {
    "point": ("--mesh", "hgx-ib-72", "--batch", "4096", "--input-tokens", "8192"),
    "recommend": ("--mesh", "hgx-ib-16", "--batch", "512"),
    "sweep": ("--meshes", "hgx-ib-8", "nvl72", "--budgets", "0", "8"),
    "smallest": ("--least-speed", "40", "--batch", "256", "--budgets", "0"),
    "serve": ("--mesh", "hgx-ib-8", "--rate", "1", "--requests", "40"),
    "compare": ("--gpus", "72", "--batches", "8192"),
    "explain": ("--mesh", "hgx-ib-16"),
    "original": (),
    "validate": (),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_80_columns_and_keep_their_words(main, capsys, monkeypatch, name):
    main([name, *TABLES[name]])
    piped = capsys.readouterr().out
    rows = [line.rstrip() for line in piped.splitlines() if "  " in line.strip() or "──" in line]
    assert len(rows) > 2
    assert max(map(len, rows)) <= 80
    monkeypatch.setattr("kimi_jax.tables.table_console", lambda: Console(width=80))
    main([name, *TABLES[name]])
    shown = capsys.readouterr().out
    assert shown.split() == piped.split()  # the same words in the same order, none cut or broken
    lines = [line.rstrip() for line in shown.splitlines() if not line.startswith("uv run")]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    "arguments",
    [
        ("recommend", "--mesh", "nvl72", "--batch", "64"),
        ("recommend", "--mesh", "hgx-ib-16", "--context", "262144", "--try-split-cache", "--budgets", "0"),
        ("point", "--mesh", "nvl72", "--dp", "2", "--tp", "4", "--experts", "width", "--cache", "split"),
        ("smallest", "--least-speed", "100", "--batch", "64", "--gpu", "gb200"),
    ],
)
def test_decode_accepts_the_command(main, capsys, arguments):
    from kimi_jax.commands.decode import Options
    from kimi_jax.commands.options import parse

    main(arguments)
    printed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("uv run "))
    main([*arguments, "--json"])
    data = json.loads(capsys.readouterr().out)
    found = data.get("best", data)
    assert found["command"] == printed
    options = parse(Options, shlex.split(printed)[3:], None, None)
    machine = options.layout.preset()
    assert machine.name == found["mesh"]
    assert machine.layout.num_devices == found["gpus"]
    assert search.describe(machine.layout) == found["layout"]
    assert (options.speculation, options.budget) == (None if found["budget"] else "none", found["budget"] or "auto")
    if "split" in arguments:
        assert machine.layout.cache == "split"


def test_the_smallest_machine_of_each_card(main, capsys):
    main(["smallest", "--least-speed", "100", "--batch", "64", "--json"])
    first = json.loads(capsys.readouterr().out)
    for found in (first, *first["others"]):
        assert found["tokens_per_s_per_user"] >= 100
        assert found["fits"]
        assert found["concurrency"] == 64
    assert (first["mesh"], first["gpu"]) == ("hgx-ib-8", "b300")
    # One node of h200 is too slow: its best layout stays below the speed, and the answer for it is two.
    main(["recommend", "--mesh", "hgx-ib-8", "--gpu", "h200", "--batch", "64", "--json"])
    assert json.loads(capsys.readouterr().out)["best"]["tokens_per_s_per_user"] < 100
    assert {found["mesh"] for found in first["others"] if found["gpu"] == "h200"} == {"hgx-ib-16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("point", "--mesh", "nvl72", "--ep", "1", "--tp", "72"), "error: tp 72 does not divide attention heads 64"),
        (("point", "--mesh", "hgx-ib-36"), "use hgx-ib-32 or hgx-ib-40"),
        (("point", "--mesh", "nvl72", "--slots", "384"), "use 432, 504"),
        (("recommend", "--mesh", "hgx-ib-8", "--batch", "9000"), "holds 9000 requests of 8192 tokens"),
        (("point", "--hit-rates", "missing.json"), "missing.json"),
        (
            ("smallest", "--gpu", "h200", "--least-speed", "5000", "--budgets", "0"),
            "no machine gives 1 user 5000 tokens/s: the fastest, ",
        ),
        (
            ("smallest", "--gpu", "h200", "--least-speed", "1", "--batch", "900000", "--budgets", "0"),
            "no machine holds 900000 requests of 8192",
        ),
        (("recommend", "--price", "0"), "--price is 0: give the dollars of a GPU-hour"),
        (("smallest", "--least-speed", "0"), "--least-speed is 0: "),
        (("serve", "--rate", "0"), "rate is 0; it must be more than 0"),
        (("serve", "--prefill-machines", "1"), "--prefill-machines takes prompts by --rate"),
        (("smallest", "--least-speed", "9", "--gpu", "a100"), "unknown GPU 'a100'"),
    ],
)
def test_mistakes_are_one_line(main, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_starts_without_jax():
    code = "import sys; from kimi_jax.commands import estimate; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "False\n", result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--meshes", "hgx-ib-8", "nvl72", "--budgets", "0", "8"),
        ("recommend", "--mesh", "nvl36", "--goal", "throughput", "--least-speed", "50"),
        ("compare", "--gpus", "8", "36", "--batches", "1", "64"),
        ("explain", "--mesh", "hgx-ib-8"),
        ("original",),
        ("validate",),
        ("plot", "pareto", "--mesh", "hgx-ib-8"),
        ("plot", "overhead-wall"),
        ("plot", "throughput"),
        ("plot", "budget"),
    ],
)
def test_every_subcommand_as_table_and_json(main, capsys, arguments):
    main(arguments)
    assert capsys.readouterr().out.strip()
    main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)


def test_check_refuses_before_it_compiles(main, capsys):
    for arguments, message in ((["--layers", "62"], "layers is 62"), (["--batch", "0"], "requests is 0")):
        with pytest.raises(SystemExit):
            main(["check", *arguments])
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("place", [("--mesh", "hgx-ib", "--gpu", "h200"), ("--mesh", "nvl72", "--cache", "split")])
def test_estimator_and_compiler_agree_at_full_width(place):
    command = [sys.executable, SCRIPT, "check", *place, "--layers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    assert "Ledger and compiler agree." in done.stdout


def test_any_model_of_the_family(main, capsys, tmp_path):
    """The bundled small model with its drafter, and a model of K2.6's sizes with fewer experts."""
    assets = Path(__file__).parents[2] / "kimi_jax" / "assets"
    small = ["--checkpoint", str(assets / "small"), "--drafter", str(assets / "small_drafter")]
    place = ["point", "--mesh", "local", "--gpu", "h200", "--json"]
    main([*place, *small, "--tp", "2", "--budget", "7"])
    data = json.loads(capsys.readouterr().out)
    config = ModelConfig.from_json(assets / "small")
    experts = 3 * config.hidden_size * config.moe_intermediate_size * (4 / 8 + 2 / config.quantization_group_size)
    held = config.num_moe_layers * config.n_routed_experts / 2 * experts
    assert data["memory"]["weights"]["experts"] == pytest.approx(held)
    assert data["parts"]["drafter"]["ms"] > 0
    raw = json.loads((assets / "k26_config.json").read_text())
    raw["text_config"]["n_routed_experts"] = 96
    other = tmp_path / "config.json"
    other.write_text(json.dumps(raw))
    main([*place, "--checkpoint", str(other), "--tp", "8"])
    data = json.loads(capsys.readouterr().out)
    assert data["memory"]["weights"]["experts"] == pytest.approx(60 * 96 * 24_772_608 / 8)
    with pytest.raises(SystemExit):
        main([*place, "--checkpoint", str(other), "--drafter", str(assets / "small_drafter")])
    assert "does not fit the target" in capsys.readouterr().err


def test_other_checkpoints_precisions_and_trees(main, capsys, tmp_path):
    """DeepSeek-R1's shapes, which the program does not run, in the precisions that its copies have."""
    sizes = {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "max_position_embeddings": 163840, "n_group": 8,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sizes))
    place = (
        "point",
        "--mesh",
        "hgx-ib-8",
        "--tp",
        "8",
        "--experts",
        "width",
        "--budget",
        "0",
        "--checkpoint",
        str(file),
    )

    def point(*arguments: str) -> dict[str, Any]:
        main([*place, "--json", *arguments])
        return json.loads(capsys.readouterr().out)

    weights = 58 * 256 * 3 * 7168 * 2048 / 8
    for precision, each in (("fp8", 1 + 4 / 128**2), ("nvfp4", 0.5 + 1 / 16), ("bf16", 2.0)):
        found = point("--precision", precision)["memory"]
        assert found["weights"]["experts"] == pytest.approx(weights * each)
    copied = point("--precision", "fp8")["memory"]["cache"]
    assert point("--precision", "fp8", "--kv", "fp8")["memory"]["cache"] == pytest.approx(copied / 2)
    main([*place, "--precision", "fp8"])
    assert "decode.py" not in capsys.readouterr().out  # it could not
    file.write_text(json.dumps(sizes | {"v_head_dim": "wide"}))
    with pytest.raises(SystemExit):
        main(place)
    assert "v_head_dim" in capsys.readouterr().err
    speeds = []
    for diversity in ("1", "0.48"):
        main(["point", "--mesh", "hgx-ib-8", "--tp", "8", "--tree-diversity", diversity, "--json"])
        speeds.append(json.loads(capsys.readouterr().out)["tokens_per_s_per_user"])
    assert speeds[1] > 1.1 * speeds[0]
