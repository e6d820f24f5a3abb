"""The figures of docs/benchmarking.md are those of the records it names."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "h200"
PAGE = (ROOT / "docs" / "benchmarking.md").read_text(encoding="utf-8")


def record(name):
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def step_rows():
    cells = {}
    for cell in record("step")["cells"]:
        place = (cell["batch_size"], cell["context"])
        cells.setdefault(place, {})[cell["kv_cache_dtype"]] = cell
    for (batch, context), by_kv in cells.items():
        bf16, fp8 = by_kv["bfloat16"], by_kv["fp8"]
        fraction, over = bf16["fraction_of_limit"]["arch"], bf16["overhead_us_per_layer"]["arch"]
        yield (
            f"| {batch} | {context:,} | {bf16['step_ms']['median']:.3f} "
            f"| {fp8['step_ms']['median']:.3f} | {bf16['limit_ms']['arch']:.3f} "
            f"| {100 * fraction:.1f} % | {over:.1f} |"
        )


def serve_rows():
    for run in record("serve")["runs"]:
        yield (
            f"| {run['max_concurrency']} | {run['output_throughput']:,.0f} "
            f"| {run['median_tpot_ms']:.2f} | {run['median_itl_ms']:.2f} | {run['p99_itl_ms']:.1f} "
            f"| {run['median_ttft_ms']:.0f} | {run['p99_ttft_ms']:,.0f} |"
        )


@pytest.mark.parametrize("row", [*step_rows(), *serve_rows()])
def test_every_row_of_the_page_is_in_a_record(row):
    assert row in PAGE


def test_the_seal_is_told_as_it_was_found():
    found = record("seal")
    after, ttft = found["after_ready"], found["ttft_ms"]
    assert all(found["bounds"].values())
    assert (after["compilations"], after["growth_bytes"]) == (0, 0)
    assert f"{found['requests']:,} requests of {found['lengths']['different']:,} lengths" in PAGE
    new, repeated = ttft["new_length"]["p99"], ttft["repeated_length"]["p99"]
    assert f"{new:.2f} ms for a new length, {repeated:.2f} ms for a repeated one" in PAGE


def test_what_was_missed_is_said():
    for name, judged in record("step")["bounds"].items():
        verdict = "held" if judged["held"] else "**missed**"
        assert f"| {name} | {judged['value']:g} | {verdict} |" in PAGE
