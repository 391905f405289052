from pathlib import Path

from kimi_jax.estimator.study import document

PATH = Path(__file__).parents[2] / "docs" / "cluster_scaling.md"


def test_document_is_what_the_model_says_today():
    assert PATH.read_text() == document.cluster_scaling(), f"docs/cluster_scaling.md is stale: run `{document.COMMAND}`"


def test_document_names_the_corrections():
    text = PATH.read_text()
    for figure in ("3.67 MB", "570.8 GB", "594.2 GB", "tp sizes that work are 1, 2, 4, 8, 16, 32, 64", "0.982"):
        assert figure in text
    assert "which is inside the model's error" in text
