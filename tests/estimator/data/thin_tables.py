"""Thin measured tables of ai-dynamo/aiconfigurator (commit 095f58a, Apache-2.0) to what the tests compare with.

Usage: python thin_tables.py EXPORT_DIR, where EXPORT_DIR holds the tables as CSV: moe_int4_384e_h7168_i2048_top8.csv,
custom_allreduce_bf16.csv, gb200_nvlink_alltoall_h7168_top8_256e.csv, deepep_ll_h7168_top8.csv and
mla_decode_module.csv. Times are µs, sizes bytes. Writes experts.csv, all_reduce.csv, exchange.csv and attention.csv
beside this file.
"""

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent


def read(directory: Path, name: str) -> list[dict[str, str]]:
    """Rows of one exported table."""
    with (directory / name).open() as file:
        return list(csv.DictReader(file))


def write(name: str, header: tuple[str, ...], rows: Iterable[tuple]) -> None:
    """Write one thinned table."""
    with (HERE / name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main(directory: Path) -> None:
    """Thin all four tables."""
    cards = {"h200_sxm": "h200", "b300_sxm": "b300", "gb300": "gb300", "rtx_pro_6000_server": "rtx-pro-6000"}
    engines = {"h200": "sglang/0.5.14", "b300": "sglang/0.5.14", "gb300": "sglang/0.5.14",
               "rtx-pro-6000": "vllm/0.24.0"}  # fmt: skip
    tokens, splits = {"8", "16", "32", "64", "128", "256"}, {("1", "1"), ("8", "1"), ("1", "8"), ("1", "32")}
    write(
        "experts.csv",
        ("gpu", "tp", "ep", "tokens", "us"),
        (
            (cards[r["system"]], r["moe_tp_size"], r["moe_ep_size"], r["num_tokens"], r["latency_us"])
            for r in read(directory, "moe_int4_384e_h7168_i2048_top8.csv")
            if r["system"] in cards
            and r["engine"] == engines[cards[r["system"]]]
            and r["distribution"] == "balanced"
            and r["num_tokens"] in tokens
            and (r["moe_tp_size"], r["moe_ep_size"]) in splits
        ),
    )
    best: dict[tuple[str, int, int], float] = {}
    for r in read(directory, "custom_allreduce_bf16.csv"):
        size = int(r["bytes"])
        if r["system"] in cards and not r["kernel_source"].endswith("eager") and 2**14 <= size <= 2**24:
            key = cards[r["system"]], int(r["num_gpus"]), size
            best[key] = min(best.get(key, float("inf")), float(r["latency_us"]))
    write("all_reduce.csv", ("gpu", "gpus", "bytes", "us"), ((*key, us) for key, us in best.items()))
    total: dict[tuple[str, int, int], float] = {}
    for r in read(directory, "gb200_nvlink_alltoall_h7168_top8_256e.csv"):
        wanted = r["kernel_source"] == "NVLinkTwoSided" and r["moe_dtype"] == "bfloat16"
        if wanted and r["moe_ep_size"] in ("8", "32", "64") and r["num_tokens"] in ("8", "32", "128", "512", "2048"):
            key = "gb200", int(r["moe_ep_size"]), int(r["num_tokens"])
            total[key] = total.get(key, 0.0) + float(r["latency_us"])
    for r in read(directory, "deepep_ll_h7168_top8.csv"):
        if r["system"] == "h200_sxm" and r["num_experts"] == "256" and r["num_token"] in ("8", "32", "128"):
            us = float(r["dispatch_avg_t_us"]) + float(r["combine_avg_t_us"])
            total["h200", 8 * int(r["node_num"]), int(r["num_token"])] = us
    write("exchange.csv", ("gpu", "ranks", "tokens", "us"), ((*key, round(us, 2)) for key, us in total.items()))
    write(
        "attention.csv",
        ("gpu", "heads", "batch", "context", "us"),
        (
            ("b300", r["num_heads"], r["batch_size"], r["context"], r["latency_us"])
            for r in read(directory, "mla_decode_module.csv")
            if r["system"] == "b300_sxm"
            and r["engine"].startswith("trtllm")
            and r["kv_cache_dtype"] == "bfloat16"
            and r["num_heads"] in ("8", "64")
            and r["batch_size"] in ("1", "8", "64", "256")
            and r["context"] in ("512", "4096", "32768")
        ),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
