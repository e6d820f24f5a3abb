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


BREAKDOWN = {  # kernels: the parts of the bytes that they read
    ("experts_up", "experts_down"): ("experts", "shared_experts"),
    ("project_part",): (
        "lm_head", "attention_qo", "attention_kv", "index_q", "index_k", "dense_mlp",
    ),
    ("score_blocks", "attend_blocks", "merge_parts"): ("index keys", "kv sparse"),
    ("add_norm",): ("norms",),
    ("router_logits_few", "route_step"): ("router",),
    ("attend_dense",): ("kv dense",),
    ("write_step",): (),
}  # fmt: skip


def breakdown_rows():
    """Of batch 4: what kernels add to the step, and what their bytes need at the arch's rate."""
    (cell,) = (
        c
        for c in record("step")["cells"]
        if (c["batch_size"], c["context"], c["kv_cache_dtype"]) == (4, 8704, "bfloat16")
    )
    us_per_byte = cell["limit_ms"]["arch"] * 1e3 / cell["total_bytes"]
    layers = sum(cell["layers"].values())
    for kernels, parts in BREAKDOWN.items():
        rows = [row for row in cell["kernels"]["rows"] if row["name"] in kernels]
        adds, needed = sum(r["adds_us"] for r in rows), sum(cell["bytes"][p] for p in parts)
        needed *= us_per_byte
        names = ", ".join(f"`{name}`" for name in kernels)
        yield (
            f": {names} | {sum(r['launches'] for r in rows):.0f} | {adds:.1f} | {needed:.1f} "
            f"| {(adds - needed) / layers:.1f} |"
        )


def serve_rows():
    for run in record("serve")["runs"]:
        yield (
            f"| {run['max_concurrency']} | {run['output_throughput']:,.0f} "
            f"| {run['median_tpot_ms']:.2f} | {run['median_itl_ms']:.2f} | {run['p99_itl_ms']:.1f} "
            f"| {run['median_ttft_ms']:.0f} | {run['p99_ttft_ms']:,.0f} |"
        )


@pytest.mark.parametrize("row", [*step_rows(), *breakdown_rows(), *serve_rows()])
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
