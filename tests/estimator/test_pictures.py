import sys

import pytest

from kimi_jax.estimator import pictures, search
from kimi_jax.estimator.pictures import Picture, Series
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.estimator.step import estimate
from kimi_jax.estimator.study.document import budget_scenarios, wall
from meshes import gpu

LINE = Picture("line", "A line", "x", "y", (Series("up", (1, 2, 3), (0, 1, 2)), Series("flat", (1, 3), (2, 2))))


def test_terminal_picture_puts_marks_where_the_points_are():
    lines = pictures.terminal(LINE, width=5, height=3).plain.splitlines()
    assert lines[0] == "A line"
    # The second series' mark covers the first's last point.
    assert [line.split("│")[1] for line in lines[1:4]] == ["◆   ◆", "  ●  ", "●    "]
    assert lines[1].strip().startswith("2 │")
    assert "● up" in lines[-2]
    assert "◆ flat" in lines[-1]


def test_stacked_series_lie_on_each_other():
    stack = Picture("s", "s", "x", "y", (Series("a", (1, 2), (1, 1)), Series("b", (1, 2), (1, 3))), is_stacked=True)
    lines = pictures.terminal(stack, width=2, height=5).plain.splitlines()
    assert [line.split("│")[1] for line in lines[1:6]] == [" ◆", "  ", "◆ ", "●●", "  "]


def test_pictures_hold_the_estimates():
    machine = search.machine_of("nvl", 8)
    s = make_scenario(machine, gpu("gb300"), concurrency=1, context=8192, budget=8)
    steps = wall(s, (8, 64))
    picture = pictures.wall_picture(steps)
    assert sum(series.y[1] for series in picture.series) == pytest.approx(steps[1].step_ms, abs=0.05)
    budgets = pictures.budget_picture(budget_scenarios(s), (0, 8))
    assert budgets.series[0].y[1] == pytest.approx(estimate(s).tokens_per_s_per_user)
    front = pictures.pareto_picture(machine, s, (1, 64))
    for series in front.series:
        assert list(series.x) == sorted(series.x, reverse=True)
        assert list(series.y) == sorted(series.y)


def test_png_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RuntimeError, match="install the extra `plots`"):
        pictures.save_png(LINE, tmp_path / "line.png")


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    pictures.save_png(LINE, tmp_path / "line.png")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
