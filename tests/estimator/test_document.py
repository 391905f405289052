from pathlib import Path

import pytest

from kimi_jax.estimator.study import document

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["estimator.md", pytest.param("cluster_scaling.md", marks=pytest.mark.slow)])
def test_documents_are_what_the_model_says_today(name):
    assert (DOCS / name).read_text() == document.document(name), f"docs/{name} is stale: run `{document.COMMAND}`"


def test_documents_name_the_corrections():
    text = (DOCS / "cluster_scaling.md").read_text()
    for figure in ("3.67 MB", "570.8 GB", "594.2 GB", "tp sizes that work are 1, 2, 4, 8, 16, 32, 64", "0.982"):
        assert figure in text
    assert len(text.split()) < 3400
    assert "trees fill experts" in text


def test_a_rack_leads_at_equal_speed_and_less_with_prompts():
    lines = (DOCS / "cluster_scaling.md").read_text().splitlines()
    cells = next(line for line in lines if line.startswith("| 50 |")).split("|")
    public, _, prompts = (float(cell.replace("×", "")) for cell in cells[-4:-1])
    assert 1.2 < public < 1.5
    assert prompts < public
