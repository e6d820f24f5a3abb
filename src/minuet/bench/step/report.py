"""The record of ``minuet bench step`` as tables. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

_KERNELS = 16  # rows shown; the record has all
_NAME_WIDTH = 58
_BAR_WIDTH = 30


def lines(record: Mapping[str, Any]) -> Iterator[str]:
    """The tables, line by line."""
    model, device = record["model"], record["device"]
    part = "" if model["rank_of"] == 1 else f", share of one of {model['rank_of']} ranks"
    yield f"{model['name']}: {model['params'] / 1e9:.4g} B parameters{part}"
    arch = device["bandwidth_bytes_per_s"]
    known = f"; {arch / 1e12:.3f} by the table ({device['bandwidth_source']})" if arch else ""
    yield f"a plain read here: {device['plain_read_bytes_per_s'] / 1e12:.3f} TB/s{known}"
    yield ""
    yield from _steps(record["cells"])
    for cell in record["cells"]:
        yield ""
        yield f"{_title(cell)}"
        yield from _parts(cell)
        if "kernels" in cell:
            yield ""
            yield from _kernels(cell)


def _title(cell: Mapping[str, Any]) -> str:
    kv = cell.get("kv_cache_dtype", "")  # where a record has several
    return f"{cell['phase']} {cell['batch_size']} x {cell['query_len']} at {cell['context']:,} {kv}"


def _yardstick(cell: Mapping[str, Any]) -> str:
    """The limit that figures are held against: the arch's where there is one."""
    return "arch" if "arch" in cell["limit_ms"] else "plain_read"


def _steps(cells: list[Mapping[str, Any]]) -> Iterator[str]:
    yield (
        f"{'step':<36}{'median ms':>11}{'p20':>9}{'p80':>9}{'tokens/s':>11}{'GB':>8}"
        f"{'limit ms':>10}{'of limit':>10}{'us/layer over':>15}"
    )
    for cell in cells:
        time, against = cell["step_ms"], _yardstick(cell)
        yield (
            f"{_title(cell):<36}{time['median']:>11.3f}{time['p20']:>9.3f}{time['p80']:>9.3f}"
            f"{cell['tokens_per_s']:>11,.0f}{cell['total_bytes'] / 1e9:>8.2f}"
            f"{cell['limit_ms'][against]:>10.3f}{cell['fraction_of_limit'][against]:>10.1%}"
            f"{cell['overhead_us_per_layer'][against]:>15.2f}"
        )


def _parts(cell: Mapping[str, Any]) -> Iterator[str]:
    total = cell["total_bytes"]
    for name, size in sorted(cell["bytes"].items(), key=lambda item: -item[1]):
        bar = "#" * round(_BAR_WIDTH * size / total)
        yield f"  {name:<16}{size / 1e6:>12,.2f} MB {size / total:>6.1%} {bar}"
    experts = cell["distinct_experts"]
    if experts["mean"] is not None:
        yield (
            f"  experts visited per layer: {experts['mean']} measured, "
            f"{experts['if_uniform']} if routing were uniform"
        )


def _kernels(cell: Mapping[str, Any]) -> Iterator[str]:
    kernels = cell["kernels"]
    yield (f"  {'kernel':<{_NAME_WIDTH}}{'launches':>9}{'own us':>11}{'adds us':>11}{'of step':>9}")
    for row in kernels["rows"][:_KERNELS]:
        name = row["name"]
        if len(name) > _NAME_WIDTH - 1:
            name = name[: _NAME_WIDTH - 4] + "..."
        yield (
            f"  {name:<{_NAME_WIDTH}}{row['launches']:>9g}{row['us']:>11,.2f}"
            f"{row['adds_us']:>11,.2f}{row['share']:>9.1%}"
        )
    others = kernels["rows"][_KERNELS:]
    if others:
        us, adds = (sum(row[key] for row in others) for key in ("us", "adds_us"))
        yield f"  {f'{len(others)} others':<{_NAME_WIDTH}}{'':>9}{us:>11,.2f}{adds:>11,.2f}"
    yield (
        f"  {'rest: the step without a profiler less these':<{_NAME_WIDTH}}{'':>20}"
        f"{kernels['rest_us']:>11,.2f}"
    )
