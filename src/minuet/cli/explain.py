"""``minuet explain``: all that would run, before anything is loaded and without a device.

The data is :mod:`minuet.planning.explain`'s; here it is only laid out. ``rich`` is imported when a
table is printed, torch and the compilers never.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from minuet.cli import options as cli_options
from minuet.errors import ConfigError, Refusal
from minuet.planning import explain
from minuet.planning.execution import ExecutionPlan, plan_or_refuse
from minuet.planning.memory import human_bytes
from minuet.platform.arch import ARCHS
from minuet.settings import parse_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SUMMARY = """Show what would run, before loading a weight and without a GPU.

Kernels and why each other one is refused, step shapes, scratch, memory to the byte, the limit of a
decode step, and every setting with its source. Exit code 0: servable; 2: refused, and what to
change."""
EXAMPLES = f"""examples:
  minuet explain minimax-m3 --arch gfx1250 -tp 4 --kv-cache-dtype fp8
  minuet explain ./checkpoint --arch sm90 -tp 8 --max-model-len 128K
  minuet explain minimax-m3 --arch gfx950 -tp 4 --batch 16 --context 32K --num-speculative-tokens 3
  minuet explain minimax-m3 --arch sm90 --json | jq .refusals

archs: {", ".join(ARCHS)}
"""

_DEFAULT_BATCH, _DEFAULT_CONTEXT = 4, 8192
_NARROW_WIDTH = 100  # columns of a pipe or a file, unless COLUMNS says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the sub-command: every setting, and the decode step to look at."""
    cli_options.add_settings(parser)
    step = parser.add_argument_group("the decode step whose limit is shown")
    step.add_argument(
        "--batch", metavar="N", help=f"requests in the step. Default: {_DEFAULT_BATCH}"
    )
    step.add_argument(
        "--context",
        metavar="TOKENS",
        help=f"tokens in the cache of each (8K = 8,192). Default: {_DEFAULT_CONTEXT}, or less",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Print the plan or the refusals; 0 if servable, 2 if refused."""
    options = cli_options.read(args)
    model = cli_options.model_of(options)
    arch = cli_options.arch_of(options)
    plan, refusals = plan_or_refuse(options, model.facts, arch)
    if plan is None:
        found = explain.refused(refusals, model.facts, arch)
    else:
        found = explain.report(plan, **_step(args, plan))
    if args.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    elif plan is None:
        _print_refused(found)
    else:
        _print_plan(found)
    return 0 if plan else 2


def _step(args: argparse.Namespace, plan: ExecutionPlan) -> dict[str, int]:
    """The decode step to show.

    Raises:
        ConfigError: a step that this plan can never run.
    """
    query_len, longest = plan.shapes.query_lens[-1], plan.config.max_model_len
    batch = _count("--batch", args.batch, min(_DEFAULT_BATCH, plan.config.max_num_seqs))
    context = _count("--context", args.context, min(_DEFAULT_CONTEXT, longest))
    if not 1 <= batch <= plan.config.max_num_seqs:
        expected = f"1 to --max-num-seqs {plan.config.max_num_seqs}"
        raise ConfigError("bad value for --batch", got=batch, expected=expected)
    if not query_len <= context <= longest:
        expected = f"{query_len} to the longest request, {longest}"
        raise ConfigError("bad value for --context", got=context, expected=expected)
    return {"batch": batch, "context": context, "query_len": query_len}


def _count(flag: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        return parse_count(text)
    except ValueError:
        expected = "a count (8k = 8,000, 8K = 8,192)"
        raise ConfigError(f"bad value for {flag}", got=text, expected=expected) from None


# --- tables --------------------------------------------------------------------------------------


def _console() -> "Console":
    """Colour on a terminal, unless ``NO_COLOR`` is set; plain text of a known width elsewhere."""
    from rich.console import Console

    width = None
    if not sys.stdout.isatty():
        width = shutil.get_terminal_size((_NARROW_WIDTH, 24)).columns
    return Console(width=width, highlight=False)


def _table(title: str, *columns: str, right: Iterable[int] = ()) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        show_edge=False,
        pad_edge=False,
    )
    numbers = set(right)
    for position, name in enumerate(columns):
        table.add_column(name, justify="right" if position in numbers else "left", overflow="fold")
    return table


def _print_refused(found: dict[str, Any]) -> None:
    from rich.padding import Padding

    console = _console()
    console.print(_headline(found))
    console.print("[bold red]REFUSED[/]: nothing is loaded, nothing listens")
    for remedy, rows in _by_remedy(found["refusals"]):
        console.print()
        console.print(
            f"[bold green]{_plain(remedy)}[/]" if remedy else "[dim]no single flag helps[/]"
        )
        for who, r in rows:
            line = _plain(f"{r['field']} {r['got']}; accepts {r['accepts']}")
            line += f" [dim]({_plain(who)})[/]"
            console.print(Padding(line, (0, 0, 0, 4)))


def _print_plan(found: dict[str, Any]) -> None:
    console = _console()
    console.print(_headline(found))
    if found["runnable"]:
        console.print("[bold green]SERVABLE[/]")
    else:
        console.print("[bold green]SERVABLE[/] as planned, [bold yellow]NOT RUNNABLE HERE[/]:")
    for reason, kernels in explain.group_obstacles(Refusal(**o) for o in found["obstacles"]):
        console.print(f"  {_plain(', '.join(kernels))}: [yellow]{_plain(reason)}[/]")
    step = found["roofline"]
    for table, note in (
        (_kernel_table(found), ""),
        (_refusal_table(found), ""),
        (_shape_table(found), ""),
        (_layout_table(found), ""),
        (_memory_table(found), ""),
        (_roofline_table(step), _limit_note(step, found["arch"])),
        (_setting_table(found), ""),
    ):
        console.print()
        console.print(table)
        if note:
            console.print(_plain(note))


def _by_remedy(
    refusals: list[dict[str, Any]],
) -> list[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Refusals under the change that removes them, each with everybody who shares it.

    What nothing removes by itself comes last.
    """
    shared: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in refusals:
        backend = r["kernel"].partition(".")[0]
        shared.setdefault((r["remedy"], backend, r["field"], r["got"], r["accepts"]), []).append(r)
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for (remedy, backend, *_), members in shared.items():
        names = [r["kernel"].removeprefix(backend).removeprefix(".") for r in members]
        who = f"{backend}: {', '.join(names)}" if any(names) else backend
        groups.setdefault(remedy, []).append((who, members[0]))
    return sorted(groups.items(), key=lambda group: not group[0])


def _plain(text: object) -> str:
    """Text in which square brackets are not markup."""
    from rich.markup import escape

    return escape(str(text))


def _headline(found: dict[str, Any]) -> str:
    model, arch = found["model"], found["arch"]
    layers = ", ".join(f"{count} {kind}" for kind, count in model["layers"].items())
    return (
        f"[bold]{_plain(model['name'])}[/]  {explain.human_params(model['params'])} parameters, "
        f"{layers} layers, on {arch['name']} ({_plain(arch['card'])})"
    )


def _kernel_table(found: dict[str, Any]) -> "Table":
    """Calls with the same kernel in one row."""
    table = _table("Kernels", "layers", "operation", "in steps", "kernel", "verified")
    rows: dict[tuple[str, str, str], list[str]] = {}
    for call in found["calls"]:
        level = call["level"] if call["runnable"] else "declared; not in this version"
        key = (call["layer_kind"], call["op"], f"{call['kernel']}\0{level}")
        phase = call["phase"]
        rows.setdefault(key, []).append(
            f"decode x{call['query_len']}" if phase == "decode" else phase
        )
    for (kind, op, kernel_level), steps in rows.items():
        kernel, _, level = kernel_level.partition("\0")
        shown = f"[yellow]{level}[/]" if level.startswith("declared") else level
        table.add_row(kind, op, ", ".join(steps), f"[bold]{kernel}[/]", shown)
    return table


def _refusal_table(found: dict[str, Any]) -> "Table":
    """Every kernel that was not chosen, with all its reasons; equal answers in one row."""
    table = _table("Kernels that were not chosen", "kernel", "for", "because")
    rows: dict[tuple[str, str], list[str]] = {}
    for call in found["calls"]:
        for other in call["others"]:
            reasons = [
                f"{r['field']} {r['got']}; accepts {r['accepts']}" for r in other["refusals"]
            ]
            because = "\n".join(reasons) or "stands further down in the order of this arch"
            rows.setdefault((other["kernel"], because), []).append(
                f"{call['layer_kind']} {call['op']}"
            )
    for (kernel, because), calls in rows.items():
        table.add_row(kernel, ", ".join(dict.fromkeys(calls)), _plain(because))
    return table


def _shape_table(found: dict[str, Any]) -> "Table":
    """Every shape; neighbours that differ in their size only share a row."""
    title = f"Step shapes: these {len(found['shapes'])} and no others"
    table = _table(title, "phase", "padded to", "graph", "query chunk", "workspace", right=(3, 4))

    def alike(shape: dict[str, Any]) -> tuple[Any, ...]:
        return (shape["phase"], shape["query_len"], shape["graph"])

    for (phase, query_len, graph), group in groupby(found["shapes"], key=alike):
        shapes = list(group)
        what = f"decode, {query_len} query token(s)" if phase == "decode" else "prefill"
        unit = "num_seqs" if phase == "decode" else "num_tokens"
        unit_name = "requests" if phase == "decode" else "tokens"
        sizes = ", ".join(str(shape[unit]) for shape in shapes)
        chunk = max(shape["query_chunk"] for shape in shapes)
        most = max(shape["workspace_bytes"] for shape in shapes)
        table.add_row(
            what,
            f"{sizes} {unit_name}",
            "yes" if graph else "no",
            f"up to {chunk}",
            f"up to {human_bytes(most)}",
        )
    return table


def _layout_table(found: dict[str, Any]) -> "Table":
    table = _table(
        "KV cache, one rank", "layers", "form", "lanes of a page", "bytes/token", right=(3,)
    )
    for layout in found["layouts"]:
        lanes = "\n".join(
            f"{lane['name']} {lane['dtype']} {lane['shape']}" for lane in layout["lanes"]
        )
        table.add_row(
            f"{layout['layers']} {layout['layer_kind']}",
            layout["form"],
            _plain(lanes),
            f"{layout['token_bytes']:,}",
        )
    memory = found["memory"]
    table.add_row("[bold]all[/]", "", "", f"[bold]{memory['token_bytes']:,}[/]")
    return table


def _memory_table(found: dict[str, Any]) -> "Table":
    memory = found["memory"]
    table = _table("Memory, one rank", "what", "bytes", "", "note", right=(1, 2))
    for name, size, note in _memory_rows(memory, found["arch"]):
        shown = "" if size is None else f"{size:,}"
        table.add_row(name, shown, "" if size is None else human_bytes(size), _plain(note))
    return table


def _memory_rows(
    memory: dict[str, Any], arch: dict[str, Any]
) -> Iterator[tuple[str, int | None, str]]:
    for weight in memory["weights"]:
        how = f"1/{weight['shards']}" if weight["shards"] > 1 else "whole"
        yield f"weights: {weight['name']}", weight["bytes"], f"{weight['dtype']}, {how}"
    yield "[bold]weights[/]", memory["weight_bytes"], "exact"
    yield "[bold]workspace[/]", memory["workspace_bytes"], "exact; one allocation for every shape"
    yield "[bold]graphs[/]", memory["graph_bytes"], memory["graph_reason"]
    yield "[bold]activations[/]", memory["activation_bytes"], memory["activation_reason"]
    pages = (
        f"exact; {memory['num_pages']} pages of {memory['page_bytes']:,} B, "
        f"{memory['dummy_pages']} of them for padding"
    )
    yield "[bold]KV pages[/]", memory["kv_bytes"], pages
    if memory["budget_bytes"] is not None:
        yield "unused", memory["unused_bytes"], "less than a page, unless the pool was given a size"
        yield "budget", memory["budget_bytes"], f"of {memory['device_bytes']:,} B"
        yield "device", memory["device_bytes"], arch["memory_source"]
    requests = (
        f"{memory['num_tokens']:,} tokens: {memory['concurrent_requests']} request(s) "
        f"of the longest length, {memory['max_model_len']:,}"
    )
    yield "room for", None, requests


def _roofline_table(step: dict[str, Any]) -> "Table":
    title = f"Limit of one step, one rank: {step['step']}"
    table = _table(title, "reads", "GB", "GFLOP", right=(1, 2))
    for part in step["parts"]:
        table.add_row(part["name"], f"{part['bytes'] / 1e9:.3f}", f"{part['flops'] / 1e9:.3f}")
    total = (f"{step['bytes'] / 1e9:.3f}", f"{step['flops'] / 1e9:.3f}")
    table.add_row("[bold]total[/]", *(f"[bold]{t}[/]" for t in total))
    return table


def _limit_note(step: dict[str, Any], arch: dict[str, Any]) -> str:
    """What the table comes to on this arch."""
    if step["limit_s"] is None:
        note = f"no limit of time: {arch['bandwidth_source']}"
    else:
        note = (
            f"at least {step['limit_s'] * 1e3:.3f} ms, bound by {step['bound_by']}, "
            f"at {arch['bandwidth_bytes_per_s'] / 1e12:.4g} TB/s ({arch['bandwidth_source']})"
        )
    if step["distinct_experts"]:
        note += f"; {step['distinct_experts']:.2f} distinct experts per layer if routing is uniform"
    return note


def _setting_table(found: dict[str, Any]) -> "Table":
    table = _table("Settings", "flag", "value", "from")
    for setting in found["settings"]:
        source = setting["source"]
        shown = f"[dim]{source}[/]" if source == "default" else f"[bold]{source}[/]"
        table.add_row(setting["flag"], _plain(setting["value"]), shown)
    return table
