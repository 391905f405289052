"""Two reports that differ in known places."""

import copy
import json

import pytest
from rich.table import Table

from kimi_jax.profiling.diff import Change, changes, figures, load, show

REPORT = {
    "program": "round", "mesh": "nvl72", "layout": {"tp": 8}, "gpu": "gb300", "layers": 2, "requests": 64,
    "rows_per_request": 17, "context": 8192, "budget": 16, "floor_us": 100.0, "host_transfers": [],
    "modelled_us": 300.0, "launches": {"kernels": 50, "host_waits": 0},
    "memory": {"weights": {"attention": 1000, "head": 10}, "cache": 5},
    "parts": [
        {
            "part": "exchange", "need": {"hbm_bytes": 0, "flops": 0}, "weight_bytes_read": 0, "messages": 2,
            "moved_bytes": 7,
            "link_bytes": 64, "floor_us": 1.5, "kernels": [],
            "modelled_us": 9.0, "launches": {"kernels": 11, "host_waits": 0},
            "collectives": [{"kind": "all-gather", "axes": ["ep"], "bytes": 32, "count": 2}],
        }
    ],
    "assembled": [{"name": "gate_up", "registers": 168, "spill_store_bytes": 0, "shared_bytes": 4096}],
    "materialised": [],
}  # fmt: skip


def test_only_what_differs_is_listed():
    after = copy.deepcopy(REPORT)
    after["memory"]["weights"]["attention"] = 1200
    after["parts"][0]["collectives"] = [{"kind": "all-to-all", "axes": ["ep", "tp"], "bytes": 32, "count": 2}]
    after["assembled"][0]["spill_store_bytes"] = 8
    after["materialised"] = [{"array": "target.w", "part": "attention", "bytes": 99}]
    assert changes(dict(figures(REPORT)), dict(figures(after))) == [
        Change("memory: weights of attention", 1000, 1200),
        Change("exchange: all-gather over ep of 32 bytes", 2, None),
        Change("kernel gate_up: spill stores", 0, 8),
        Change("exchange: all-to-all over ep × tp of 32 bytes", None, 2),
        Change("copy of target.w in attention", None, 99),
    ]
    assert changes(dict(figures(REPORT)), dict(figures(REPORT))) == []
    assert show([]) == "they are equal"


def test_what_is_no_report_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("nothing")
    with pytest.raises(ValueError, match=r"gone\.json: cannot be read \(No such file .*\); give a file"):
        load(tmp_path / "gone.json")
    with pytest.raises(ValueError, match=r"x\.json: not JSON"):
        load(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"x\.json: not a report"):
        load(path)


def test_the_table_has_ratios_of_numbers():
    table = show([Change("moved", 1000.5, 1500.75), Change("gpu", "h200", "b200"), Change("kernel", None, 3)])
    assert isinstance(table, Table)
    columns = [list(map(str, column.cells)) for column in table.columns]
    assert columns[1] == ["1,000", "h200", "none"]
    assert columns[2] == ["1,501", "b200", "3"]
    assert columns[3] == ["1.5", "", ""]
