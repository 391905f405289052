"""scripts/profile.py as users run it: a small model compiled for a GPU that is not here, a run on the CPU, refusals."""

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile.py"
SMALL = {
    "hidden_size": 512, "vocab_size": 4096, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "n_routed_experts": 16, "q_lora_rank": 256, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_hidden_layers": 3,
}  # fmt: skip


def profile(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if not name.startswith("JAX_")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = json.loads(resources.files("kimi_jax").joinpath("assets", "k26_config.json").read_text())
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # the real ones are beyond the small vocabulary
    config["text_config"] |= SMALL | ids
    config |= ids
    path = tmp_path_factory.mktemp("small") / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.slow
def test_json_and_dump(checkpoint, tmp_path):
    dump = tmp_path / "dump"
    done = profile(
        "--checkpoint", checkpoint, "--mesh", "local", "--gpu", "h200", "--batch", 3, "--context", 1000,
        "--budget", 0, "--layers", 2, "--json", "--xla-dump", dump, "--html", tmp_path / "report.html",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert (report["gpu"], report["mesh"], report["layers"]) == ("h200", "local", 2)
    memory = report["memory"]
    # 1,000 positions and one row round up to 1,024; 512 + 64 bfloat16 values each, in two layers.
    assert memory["cache"] == 3 * 1024 * 576 * 2 * 2
    assert memory["weights"]["embedding"] == 4096 * 512 * 2
    assert memory["weights"]["experts"] == 16 * 3 * 512 * 256 * 4.5 / 8
    # What fits is said of all three layers, the last one with 16 experts as the second.
    whole = report["whole_model"]
    assert whole["layers"] == 3
    assert whole["memory"]["cache"] == 3 * 1024 * 576 * 2 * 3
    assert whole["memory"]["weights"]["experts"] == 2 * memory["weights"]["experts"]
    assert whole["memory"]["weights"]["embedding"] == memory["weights"]["embedding"]
    assert report["verdict"].startswith(f"All 3 layers: fits with {whole['memory']['free'] / 1e9:.1f} GB free.")
    assert "Compiled were 2, which hold" in report["verdict"]
    assert memory["free"] == pytest.approx(memory["card"] - memory["total"])
    assert report["host_transfers"] == []
    assert all(not part["collectives"] for part in report["parts"])  # one device sends nothing
    assert json.loads((dump / "report.json").read_text()) == report
    assert report["host_bytes"] > 1e8
    assert "round of 2 layers on local" in (tmp_path / "report.html").read_text()
    assert "CUB" not in done.stderr  # what XLA lacks without a GPU is no news for a user
    index = (dump / "index.md").read_text()
    assert "| experts | 1 |" in index
    assert "before_optimizations.txt" in index
    assert "buffer-assignment.txt" in index


@pytest.mark.slow
def test_a_run_of_the_bundled_model(tmp_path):
    done = profile("--batch", 2, "--context", 32, "--budget", 4, "--rounds", 3, "--trace", tmp_path, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert len(report["measured_round_seconds"]) == 3
    assert {"attention", "experts", "drafter", "tree"} <= set(report["traced_part_seconds"])
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert "running 3 rounds" not in done.stderr  # --json prints nothing else


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "nvl72", "--gpu", "h200"), "nvl72 is made of gb300, gb200, not of h200"),
        (("--gpu", "a100"), "unknown GPU 'a100': choose from h100, h200, b200"),
        (("--gpu", "gb300", "--tp", 3), "tp 3 does not divide attention heads 64"),
        (("--gpu", "gb300", "--layers", 62), "layers is 62"),
        (("--gpu", "gb300", "--batch", 0), "requests is 0"),
        (("--gpu", "gb300", "--trace", "here"), "--trace needs a run: leave --gpu away"),
        (("--layers", 3), "--layers belongs to compiling for absent GPUs: add --gpu"),
    ],
)
def test_refusals(command, arguments, message):
    assert message in " ".join(command("profile", *arguments, expect=1).err.split())
