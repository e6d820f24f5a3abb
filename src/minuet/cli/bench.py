"""``minuet bench``: measure a step of the engine, or a server from outside."""

import argparse
import sys
from pathlib import Path

from minuet.attention.contract import Phase
from minuet.bench import record
from minuet.bench.step import report
from minuet.bench.step.cell import Cell
from minuet.cli import bench_serve, options
from minuet.cli.bench_serve import count
from minuet.errors import ConfigError
from minuet.models.slices import SliceSpec, write_slice

SUMMARY = "Measure one step of the engine, or a server under load."
EXAMPLES = """examples:
  minuet bench step minimax-m3 --rank-of 4 --layers 12 --batch-size 4 64 --context 8704
  minuet bench step CHECKPOINT --arch cpu --batch-size 2 --context 512 --json step.json
  minuet bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 --max-concurrency 16
  minuet bench slice minimax-m3 --rank-of 4 --layers 12 -o slice.json

docs/benchmarking.md says what every figure means.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command per thing to measure."""
    kinds = parser.add_subparsers(prog="minuet bench", metavar="WHAT", dest="what", required=True)
    _add_step(_sub(kinds, "step", "time one prepared step of the engine", "MODEL [flags]"))
    load = "load a server with requests and say how it answered"
    bench_serve.add_arguments(_sub(kinds, "serve", load, "[flags]"))
    _add_slice(_sub(kinds, "slice", "write the config of what one of N GPUs sees", "MODEL [flags]"))


def _sub(
    kinds: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str, usage: str
) -> argparse.ArgumentParser:
    return kinds.add_parser(
        name,
        usage=f"minuet bench {name} {usage}",
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run(args: argparse.Namespace) -> int:
    """Measure; 0, or 1 if a server's requests failed."""
    code: int = args.run(args)
    return code


def _add_slicing(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--rank-of",
        type=count,
        default=1,
        metavar="N",
        help="measure what one of N tensor-parallel GPUs holds, without collectives. Default: 1",
    )
    parser.add_argument(
        "--layers", type=count, metavar="N", help="keep the first N layers. Default: all"
    )
    parser.add_argument(
        "--dense-layers",
        type=count,
        metavar="N",
        help="of --layers, how many attend densely. Default: as the model has them",
    )


def _slice_of(args: argparse.Namespace) -> SliceSpec:
    return SliceSpec(args.rank_of, args.layers, args.dense_layers)


# --- step ----------------------------------------------------------------------------------------


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_step)
    options.add_settings(parser)
    _add_slicing(parser.add_argument_group("part of the model"))
    step = parser.add_argument_group("the step")
    step.add_argument("--phase", choices=[p.value for p in Phase], default=Phase.DECODE.value)
    step.add_argument("--batch-size", type=count, nargs="+", default=[4], metavar="N")
    step.add_argument(
        "--context",
        type=count,
        nargs="+",
        default=[8704],
        metavar="TOKENS",
        help="tokens in the cache of each request, the step's included; every batch size is "
        "measured at every context. Default: 8704, the middle of 8K in and 1K out",
    )
    step.add_argument(
        "--query-len",
        type=count,
        default=1,
        metavar="TOKENS",
        help="query tokens per request: prompt tokens of a prefill, drafts plus one of a decode",
    )
    effort = parser.add_argument_group("how long to look")
    effort.add_argument("--num-iters", type=count, default=100, metavar="N")
    effort.add_argument("--warmup", type=count, default=10, metavar="N")
    effort.add_argument(
        "--kernels",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="profile a few steps more and list their kernels. Default: on",
    )
    _add_output(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the record here as well")
    output.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="added to the record"
    )


def _run_step(args: argparse.Namespace) -> int:
    chosen = options.read(args)
    phase = Phase(args.phase)
    cells = [
        Cell(phase, batch, context, args.query_len)
        for context in args.context
        for batch in args.batch_size
    ]
    if args.num_iters < 1:
        raise ConfigError("bad value for --num-iters", got=args.num_iters, expected="at least 1")
    extra = record.metadata(args.metadata)

    from minuet.bench.step.measure import Effort
    from minuet.bench.step.run import run

    effort = Effort(args.num_iters, args.warmup, args.kernels)
    found = (
        run(chosen, _slice_of(args), cells, effort, lambda line: print(line, file=sys.stderr))
        | extra
    )
    if args.json:
        record.write(found, args.json)
    for line in report.lines(found):
        print(line)
    return 0


# --- slice ---------------------------------------------------------------------------------------


def _add_slice(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_run_slice)
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a preset")
    _add_slicing(parser.add_argument_group("part of the model"))
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="where to write"
    )


def _run_slice(args: argparse.Namespace) -> int:
    path = write_slice(args.model, _slice_of(args), args.output)
    print(f"{path}: start it with --load-format dummy", file=sys.stderr)
    return 0
