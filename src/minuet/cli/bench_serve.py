"""Flags of ``minuet bench serve``: vLLM's names and meanings, as far as they go."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minuet.bench import record
from minuet.errors import ConfigError
from minuet.settings import parse_count

if TYPE_CHECKING:
    from minuet.bench.serve.run import Load

_BACKENDS = ("minuet", "minuet-chat", "openai", "openai-chat")
_DATASETS = ("random", "sharegpt", "custom")


def count(text: str) -> int:
    """A count as settings have it, for argparse."""
    try:
        return parse_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no count (8k = 8,000, 8K = 8,192)") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every flag."""
    parser.set_defaults(run=run)
    _add_server(parser.add_argument_group("the server"))
    _add_data(parser.add_argument_group("what is asked"))
    _add_load(parser.add_argument_group("how fast"))
    _add_result(parser.add_argument_group("the result"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="Default: http://HOST:PORT")
    group.add_argument("--host", default="127.0.0.1", help="Default: 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, help="Default: 8000")
    group.add_argument(
        "--backend",
        choices=_BACKENDS,
        default="minuet",
        help="minuet asks for token ids as well, so that every token is timed; with openai, tokens "
        "without text of their own go unseen until the next. Default: minuet",
    )
    group.add_argument("--endpoint", default="", metavar="PATH", help="Default: the backend's")
    group.add_argument("--model", default="", help="Default: the first that the server names")
    group.add_argument(
        "--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with every request"
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="wait so long for the server to answer. Default: 60",
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=_DATASETS,
        default="random",
        help="random token ids, a ShareGPT file, or JSONL with prompt and output_tokens",
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE")
    group.add_argument("--num-prompts", type=count, default=1000, metavar="N")
    group.add_argument("--random-input-len", type=count, default=1024, metavar="TOKENS")
    group.add_argument("--random-output-len", type=count, default=128, metavar="TOKENS")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.5,
        metavar="R",
        help="lengths are uniform from (1-R) to (1+R) times the above. vLLM's default is 0; one "
        "length alone hides what a new length costs. Default: 0.5",
    )
    group.add_argument("--random-prefix-len", type=count, default=0, metavar="TOKENS")
    group.add_argument("--output-len", type=count, metavar="TOKENS", help="of the other data sets")
    group.add_argument("--vocab-size", type=count, metavar="N", help="Default: as the server says")
    group.add_argument("--ignore-eos", action="store_true", help="answer to the length asked for")
    group.add_argument("--temperature", type=float, default=0.0, help="Default: 0")
    group.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="fields added to every request"
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals. Default: 0")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="PER_SECOND",
        help="Default: inf, all at once",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="gamma shape of the intervals: 1 Poisson, less in bursts, more evenly. Default: 1",
    )
    group.add_argument(
        "--max-concurrency", type=count, metavar="N", help="requests in flight. Default: no limit"
    )
    group.add_argument(
        "--num-warmups", type=count, default=0, metavar="N", help="requests before. Default: 0"
    )


def _add_result(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES")
    group.add_argument(
        "--metric-percentiles",
        default="99",
        metavar="P,P",
        help="beside the 20th and the 80th, which are always there. Default: 99",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within limits, as ttft:500 tpot:50",
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with lists per request")
    group.add_argument("--result-dir", type=Path, default=Path(), metavar="FOLDER")
    group.add_argument(
        "--result-filename",
        metavar="NAME",
        help="Default: BACKEND-RATEqps[-concurrencyN]-MODEL-DATE.json",
    )
    group.add_argument("--label", help="in the result, and first in its file's name")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Ask, print, save; 1 if a request failed."""
    try:
        from minuet.bench.serve import metrics
        from minuet.bench.serve.run import main
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"minuet bench serve needs {missing.name}", remedy="install minuet[bench]"
        ) from None
    wanted = metrics.Wanted(
        metrics=tuple(args.percentile_metrics.split(",")),
        percentiles=_numbers(args.metric_percentiles),
        goodput_ms=metrics.parse_goodput(args.goodput),
    )
    extra = record.metadata(args.metadata)
    result, outcomes = main(_load(args), wanted)
    result |= {"label": args.label, **extra}
    for line in (*metrics.block(result, wanted), *metrics.failures(outcomes)):
        print(line)
    if args.save_detailed:
        result |= metrics.details(outcomes)
    if args.save_result or args.save_detailed:
        path = args.result_dir / (args.result_filename or _file_name(result))
        record.write(result, path)
        print(f"saved {path}", file=sys.stderr)
    return 1 if result["failed"] else 0


def _load(args: argparse.Namespace) -> "Load":
    from minuet.bench.serve.prompts import RandomLengths
    from minuet.bench.serve.run import Load

    return Load(
        base_url=(args.base_url or f"http://{args.host}:{args.port}").rstrip("/"),
        backend=args.backend,
        endpoint=args.endpoint,
        model=args.model,
        dataset=args.dataset_name,
        dataset_path=args.dataset_path,
        num_prompts=args.num_prompts,
        num_warmups=args.num_warmups,
        lengths=RandomLengths(
            input_len=args.random_input_len,
            output_len=args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        ),
        output_len=args.output_len,
        vocab_size=args.vocab_size,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra_body=_object("--extra-body", args.extra_body),
        headers=record.metadata(args.header),
        seed=args.seed,
        ready_timeout_s=args.ready_check_timeout_sec,
        progress=not args.disable_tqdm and sys.stderr.isatty(),
    )


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            "bad value for --metric-percentiles", got=text, expected="numbers, as 50,99"
        ) from None


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"bad value for {flag}", got=text, expected="a JSON object")
    return found


def _file_name(result: dict[str, Any]) -> str:
    parts = [result["label"] or result["backend"], f"{result['request_rate']}qps"]
    if result["max_concurrency"] is not None:
        parts.append(f"concurrency{result['max_concurrency']}")
    parts += [Path(result["model_id"]).name, time.strftime("%Y%m%d-%H%M%S")]
    return "-".join(parts) + ".json"
