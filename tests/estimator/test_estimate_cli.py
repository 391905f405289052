import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "estimate.py"


@pytest.fixture(scope="module")
def main():
    spec = importlib.util.spec_from_file_location("estimate_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.main


def test_point_as_json(main, capsys):
    main(["point", "--mesh", "hgx-ib-16", "--gpu", "h200", "--concurrency", "8", "--budget", "7", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["layout"] == "dp 1 × ep 2 × tp 8, experts by slots, allgather"
    assert data["tokens_per_s"] == pytest.approx(8 * data["tokens_per_s_per_user"])
    assert sum(part["ms"] for part in data["parts"].values()) == pytest.approx(data["step_ms"])
    assert data["limit_ms"] <= data["step_ms"]


def test_options_reach_the_estimate(main, capsys, tmp_path):
    def speed(*arguments: str) -> float:
        main(["point", "--mesh", "hgx-ib-16", "--concurrency", "64", "--json", *arguments])
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
    assert speed("--context", "65536", "--split-cache", "--dp", "2") > speed("--context", "65536", "--dp", "2")


def test_table_shows_parts_limit_and_memory(main, capsys):
    main(["point", "--mesh", "local", "--gpu", "rtx-pro-6000", "--tp", "8"])
    out = capsys.readouterr().out
    for word in ("attention", "reductions", "of limit", "latent cache", "Bottleneck: experts", "NCCL ring"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("point", "--mesh", "nvl72", "--tp", "72"), "error: tp 72 does not divide attention heads 64"),
        (("point", "--mesh", "hgx-ib-36"), "use hgx-ib-32 or hgx-ib-40"),
        (("point", "--mesh", "nvl72", "--slots", "384"), "use 432, 504"),
        (("recommend", "--mesh", "hgx-ib-8", "--concurrency", "9000"), "holds 9000 requests of 8192 tokens"),
        (("point", "--hit-rates", "missing.json"), "missing.json"),
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
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}, run_name='estimate'); print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "False\n", result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--meshes", "hgx-ib-8", "nvl72", "--budgets", "0", "8"),
        ("recommend", "--mesh", "nvl36", "--goal", "throughput", "--least-speed", "50"),
        ("compare", "--gpus", "8", "36", "--concurrencies", "1", "64"),
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
    for arguments, message in ((["--layers", "62"], "layers is 62"), (["--concurrency", "0"], "requests is 0")):
        with pytest.raises(SystemExit):
            main(["check", *arguments])
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("place", [("--mesh", "hgx-ib", "--gpu", "h200"), ("--mesh", "nvl72", "--split-cache")])
def test_estimator_and_compiler_agree_at_full_width(place):
    command = [sys.executable, SCRIPT, "check", *place, "--layers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    assert "Estimator and compiler agree." in done.stdout
