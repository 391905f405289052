"""The recipes of docs/architecture.md: each file registers what it adds, and here it is used as a user would."""

import dataclasses
import itertools
import runpy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.commands import decode
from kimi_jax.decoding.engine import DRAFTERS, PLAIN, Draft
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.loading import model_for
from kimi_jax.decoding.report import Report
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.parallel.exchange import BACKENDS
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.messages import collectives
from meshes.presets import PRESETS, LayoutError, preset
from pallas_kernels.operation import Device, self_check
from pallas_kernels.tree_attention import OPERATION
from pallas_kernels.tree_attention.selection import IMPLEMENTATIONS
from tests.ledger import test_explain
from tests.parallel import test_exchange

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "architecture.md"
H200 = Device("NVIDIA H200", "9.0", 132)
RECIPES = ("preset", "exchange", "kernel", "drafter")


@pytest.fixture
def recipe():
    """Runs a recipe's file; what it registers is gone behind the test."""
    tables = (PRESETS, BACKENDS, IMPLEMENTATIONS, DRAFTERS)
    before = [dict(table) for table in tables]
    yield lambda name: runpy.run_path(str(HERE / f"{name}.py"))
    assert sum(map(len, tables)) == sum(map(len, before)) + 1
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_shows_the_file(name):
    page, text = PAGE.read_text(), (HERE / f"{name}.py").read_text()
    assert f"[tests/extending/{name}.py](../tests/extending/{name}.py)" in page
    assert f"```python\n{text}```" in page


def test_a_preset_is_explained_and_costed(recipe, capsys):
    with pytest.raises(LayoutError, match="unknown mesh"):
        preset("nvl144")
    recipe("preset")
    decode.run(["--mesh", "nvl144", "--explain"], "kimi-jax decode")
    told = capsys.readouterr().out
    assert "dp 2 × ep 9 × tp 8" in told, told
    assert preset("nvl144").span("dp").link == "network"


def test_an_exchange_is_exact_and_sends_what_it_declares(recipe):
    recipe("exchange")
    for layout, kind in (("hgx-ib-16 ep 2", "random"), ("hgx-ib-16 wide ep", "one rank")):
        test_exchange.test_exact_for_any_routing("gather_all", layout, kind)
    machine = test_explain.with_exchange(test_explain.HGX.with_axes(dp=1, ep=16, tp=1), "gather_all")
    config = dataclasses.replace(test_explain.ModelConfig.from_json(test_explain.TINY), num_hidden_layers=2)
    told = test_explain.of_a_forward(config, machine, rows=4)
    text = test_explain.compiled_forward(machine, model_for(config, machine.layout), 4)
    found = test_explain.merged(collectives(Module(text), machine.layout.axis_sizes))
    want: dict[tuple, int] = {}
    for message in told:
        key = message.kind, message.axes, message.bytes
        want[key] = want.get(key, 0) + message.count
    assert {(c.kind, c.axes, c.bytes): c.count for c in found} == want
    assert len(want) == 3  # rows; slots and weights, which are alike; sums


def test_an_exchange_is_an_option_of_the_commands(recipe, capsys):
    recipe("exchange")
    decode.run(["--mesh", "hgx-ib-16", "--exchange", "gather_all", "--explain"], "kimi-jax decode")
    assert "gather_all" in capsys.readouterr().out


def test_a_kernel_is_chosen_and_compared_with_the_reference(recipe):
    found = recipe("kernel")
    case = OPERATION.cases["one request"]
    assert OPERATION.serves("decode", case)
    assert not any(OPERATION.serves("decode", each) for each in OPERATION.checks.values()), "they all have more rows"
    tree = dataclasses.replace(case.shape, rows=17)
    with pytest.raises(ValueError, match="cannot use 'decode': there are 17 rows, and it serves plain decoding alone"):
        OPERATION.choose(tree, jnp.bfloat16, H200, "decode")
    known, checks = IMPLEMENTATIONS["decode"], {"one request": case, "trees": OPERATION.cases["trees"]}
    alone = dataclasses.replace(OPERATION, implementations={"decode": known}, checks=checks)
    assert [(c.choice.implementation, c.case) for c in self_check(alone, H200)] == [("decode", "one request")]
    wrong = dataclasses.replace(known, run=lambda *a, **k: found["run"](*a, **k | {"scale": 0.1}))
    with pytest.raises(RuntimeError, match="tree_attention is wrong on NVIDIA H200: decode"):
        self_check(dataclasses.replace(alone, implementations={"decode": wrong}), H200)


def rounds_of(text: list[int], depth: int) -> list[int]:
    """Hits of each round that drafts the last token `depth` times, from the text alone: prefill draws text[0]."""
    hits = []
    while len(text) > 1:
        same = itertools.takewhile(text[0].__eq__, text[1 : 1 + depth])
        hits.append(len(list(same)))
        text = text[1 + hits[-1] :]
    return hits


def test_a_drafter_drafts_and_its_rounds_are_counted(recipe, engines):
    recipe("drafter")
    engine = engines()
    limits, prompts = Limits(max_new_tokens=40), [[7] * 12, [17, 250, 33, 90]]
    texts = {}
    for draft in (PLAIN, Draft("repeat")):
        report, texts[draft] = Report(len(prompts)), [[] for _ in prompts]
        for progress in engine.generate(prompts, limits, Sampling(), draft=draft):
            report.add(progress)
            for text, new in zip(texts[draft], progress.new_tokens, strict=True):
                text += new
    assert texts[Draft("repeat")] == texts[PLAIN]
    hits = np.concatenate([rounds_of(text, 3) for text in texts[PLAIN]])
    assert hits.any(), texts[PLAIN]
    found = report.as_dict()
    assert sum(found["acceptance_histogram"]) == len(hits)
    assert found["draft_hits"] == [int((hits > depth).sum()) for depth in range(3)]
