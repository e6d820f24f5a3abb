#!/usr/bin/env python3
"""Write a random MiniMax-M3 checkpoint of any size: real layout and tokenizer, meaningless answers.

The folder has everything a released one has (config, generation config, safetensors, tokenizer,
chat template) under the official names, so Minuet, transformers and other engines load it. The
same seed and sizes give the same weights, equal to those of `--load-format dummy`.

presets:
  tiny     0.4 M parameters, blocks of 4 tokens: every mechanism within a few dozen tokens
  tiny128  0.3 M parameters, released blocks: attention is sparse from 2,049 tokens on
  small    24 M parameters, released head size and group: what kernels are tried on
  bench    112 M parameters, large enough that arithmetic sets the speed on a CPU

examples:
  python tools/make_checkpoint.py /tmp/m3 --preset tiny128
  python tools/make_checkpoint.py /tmp/m3 --preset small --layers 3 --seed 7
  python tools/make_checkpoint.py /tmp/m3 --preset bench --dtype float32 --shard-size 100MB
"""

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.table import Table

from minuet.errors import MinuetError
from minuet.models import registry
from minuet.models.m3.export import PRESETS, Shape, make_checkpoint, shape_of
from minuet.settings import parse_bytes, parse_count

__all__ = ["main", "make_checkpoint"]

_HELP = {
    "layers": "decoder layers",
    "dense_layers": "leading layers with dense attention and FFN; the others select and route",
    "hidden": "width of the residual stream",
    "heads": "query heads",
    "kv_heads": "KV heads, and index heads; divides --heads",
    "head_dim": "channels per head; the first half is rotated",
    "index_dim": "channels of an index vector; 0 means --head-dim",
    "experts": "routed experts per layer",
    "topk_experts": "routed experts a token visits",
    "expert_width": "width of one routed expert",
    "dense_width": "width of the dense FFNs",
    "shared_width": "width of the shared expert",
    "block": "tokens per block (and per KV page)",
    "top_blocks": "blocks a query attends to; context up to block * top-blocks is dense",
    "local_blocks": "blocks up to the query's own that are always selected",
    "vocab": "rows of embedding and head; at least 268, all bytes and markers",
    "max_positions": "longest context",
    "dtype": "type of the stored tensors: float32, bfloat16 or float16; the router is float32",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write; created if missing")
    parser.add_argument("--preset", choices=list(PRESETS), default="tiny", help="(default tiny)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument(
        "--shard-size",
        type=size,
        default=5 * 10**9,
        metavar="SIZE",
        help="most bytes per file, as 100MB or 2GiB (default 5GB)",
    )
    parser.add_argument(
        "--vision-stub", action="store_true", help="add a minimal vision tower (random as well)"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier checkpoint there")
    sizes = parser.add_argument_group(
        "sizes", "change the preset; counts may be written 32K = 32,768 or 100k = 100,000"
    )
    for field in fields(Shape):
        is_name = field.name == "dtype"
        sizes.add_argument(
            "--" + field.name.replace("_", "-"),
            type=str if is_name else count,
            metavar="TYPE" if is_name else "N",
            help=_HELP[field.name],
        )
    return parser


# argparse names the function in its message: "invalid count value: 'x'"
def count(text: str) -> int:
    return parse_count(text)


def size(text: str) -> int:
    return parse_bytes(text)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = _parser().parse_args(argv)
    sizes = {
        field.name: getattr(args, field.name)
        for field in fields(Shape)
        if getattr(args, field.name) is not None
    }
    began = time.perf_counter()
    try:
        folder = make_checkpoint(
            args.folder,
            preset=args.preset,
            seed=args.seed,
            shard_bytes=args.shard_size,
            vision_stub=args.vision_stub,
            force=args.force,
            **sizes,
        )
        _summary(folder, shape_of(args.preset, **sizes), time.perf_counter() - began)
    except MinuetError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def _summary(folder: Path, shape: Shape, seconds: float) -> None:
    facts = registry.find(str(folder)).facts
    shards = sorted(folder.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in shards)
    table = Table(title=f"{folder}  (written in {seconds:.1f} s)", title_justify="left")
    table.add_column("part")
    table.add_column("parameters", justify="right")
    for group in facts.weights:
        table.add_row(group.name, f"{group.params:,}")
    table.add_section()
    table.add_row("all", f"{facts.params:,}")
    console = Console()
    console.print(table)
    console.print(
        f"{nbytes / 1e6:,.1f} MB in {len(shards)} file(s), {shape.dtype}; {shape.layers} layers, "
        f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, "
        f"{shape.experts} experts top-{shape.topk_experts}, "
        f"blocks of {shape.block} top-{shape.top_blocks}; "
        f"sparse beyond {shape.block * shape.top_blocks:,} tokens",
        highlight=False,
    )


if __name__ == "__main__":
    sys.exit(main())
