"""``minuet eval``: ask questions, keep the answers, compare runs, run entries of the catalog."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minuet.cli import options
from minuet.errors import ConfigError
from minuet.settings import SETTINGS, parse_count

if TYPE_CHECKING:
    from minuet.engine.start import Engine
    from minuet.evals.entries import Means
    from minuet.evals.questions import Task
    from minuet.evals.records import Records, Run
    from minuet.evals.run import Sampling

_GENERATED = ("arithmetic", "lists", "needle", "toolcalls", "wordproblems")
_ASKED = (*_GENERATED, "gsm8k")
_OUT = "eval-results"
_COUNT = 200
_SHOWN = 10

SUMMARY = """Ask a model questions with known answers, and compare what two runs answered.

Through the HTTP API, of a server that runs already (--base-url) or of one that is started for it.
Every answer is kept; what is answered already is not asked again. Exit code 0: done, or the entry
passed; 1: the entry did not pass, or questions stayed without an answer; 2: cannot be run."""
EXAMPLES = f"""examples:
  minuet eval arithmetic
  minuet eval needle CHECKPOINT --option length=8192 --limit 64 --kv-cache-dtype fp8
  minuet eval gsm8k --data test.jsonl --fewshot-data train.jsonl --base-url http://127.0.0.1:8000
  minuet eval compare {_OUT}/needle.jsonl@3f2a {_OUT}/needle.jsonl
  minuet eval logits CHECKPOINT --task needle --limit 4
  minuet eval selection CHECKPOINT --plot selection.svg
  minuet eval --entry tiny-needle-4k
  minuet eval --list

`minuet eval TASK --help` lists what a task accepts; docs/evaluation.md explains it all.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the sub-command and of its own sub-commands."""
    catalog = parser.add_argument_group("the catalog")
    catalog.add_argument("--entry", metavar="NAME", help="run this entry, judge its threshold")
    catalog.add_argument("--list", action="store_true", help="show the entries")
    catalog.add_argument("--check", action="store_true", help="validate the entries")
    catalog.add_argument("--schema", action="store_true", help="print their JSON schema")
    catalog.add_argument("--catalog", metavar="FOLDER", type=Path, help="use these entries instead")
    catalog.add_argument("--model", metavar="MODEL", help="serve this instead of the entry's model")
    catalog.add_argument(
        "--flags",
        metavar="'FLAGS'",
        type=shlex.split,
        default=[],
        help="more flags for the server, as '--arch sm90 --max-num-seqs 64'; the entry's give way",
    )
    _add_asking(parser)
    _add_output(parser)
    tasks = parser.add_subparsers(dest="what", metavar="TASK", required=False)
    for name in _ASKED:
        _add_task(tasks, name)
    _add_compare(tasks)
    _add_logits(tasks)
    _add_selection(tasks)


def _sub(tasks: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = tasks.add_parser(
        name,
        help=text,
        description=text,
        usage=f"minuet eval {name} [flags]",
        allow_abbrev=False,
    )
    return parser


def _add_asking(parser: argparse.ArgumentParser) -> None:
    # suppressed defaults: a sub-command's would replace what was given before it
    group = parser.add_argument_group("asking", argument_default=argparse.SUPPRESS)
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="ask this server, for MODEL or its first; none: start `minuet serve` meanwhile",
    )
    group.add_argument("--api-key", metavar="KEY", help="bearer token for it")
    group.add_argument(
        "--concurrency", metavar="N", type=_count, help="requests in flight. Default: 8"
    )
    group.add_argument("--limit", metavar="N", type=_count, help="ask the first N questions only")
    group.add_argument("--data", metavar="FILE", type=Path, help="JSONL of gsm8k's questions")
    group.add_argument(
        "--fewshot-data",
        metavar="FILE",
        type=Path,
        help="JSONL of gsm8k's examples. Default: those of --data, never the question itself",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output", argument_default=argparse.SUPPRESS)
    group.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help=f"keep answers here. Default: {_OUT}/TASK.jsonl",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object instead")
    group.add_argument("--quiet", action="store_true", help="no plan summary and no progress bar")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="Default: 0, no chance")
    group.add_argument("--max-tokens", metavar="N", type=_count, help="of an answer")
    group.add_argument("--sampling-seed", metavar="N", type=int, default=0, help="Default: 0")
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        type=_object,
        default={},
        help='variables of the chat template, as {"thinking_mode": "disabled"}',
    )


def _add_questions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--option",
        metavar="NAME=JSON",
        action="append",
        default=[],
        help="option of a generated task, as length=8192 for needle; may be repeated",
    )
    parser.add_argument(
        "--question-seed", metavar="N", type=int, default=0, help="of the draw. Default: 0"
    )


def _add_task(tasks: Any, name: str) -> None:
    parser = _sub(tasks, name, f"ask {name}")
    if name == "gsm8k":
        parser.add_argument(
            "--fewshot", metavar="N", type=_count, default=5, help="examples. Default: 5"
        )
        parser.add_argument(
            "--chat", action="store_true", help="ask as a chat, a turn for each example"
        )
    else:
        _add_questions(parser)
    _add_asking(parser)
    _add_sampling(parser)
    _add_output(parser)
    options.add_settings(parser)


def _add_compare(tasks: Any) -> None:
    parser = _sub(tasks, "compare", "compare two runs, question by question")
    for name, role in (("first", "the measure"), ("second", "what is judged")):
        parser.add_argument(
            name, metavar="FILE[@RUN]", help=f"{role}: a file of results, and a run in it"
        )
    parser.add_argument("--metric", default="", help="what counts as right. Default: the run's own")
    parser.add_argument("--most", metavar="N", type=_count, default=_SHOWN, help="questions shown")
    _add_output(parser)


def _add_logits(tasks: Any) -> None:
    parser = _sub(tasks, "logits", "keep log-probabilities of a task's texts, to compare")
    parser.add_argument("--task", choices=_ASKED, default="needle", help="Default: needle")
    parser.add_argument(
        "--top", metavar="N", type=_count, default=20, help="alternatives kept. Default: 20"
    )
    _add_questions(parser)
    _add_asking(parser)
    _add_output(parser)
    options.add_settings(parser)


def _add_selection(tasks: Any) -> None:
    parser = _sub(tasks, "selection", "audit the sparse selection, on the CPU engine")
    parser.add_argument("--length", metavar="TOKENS", type=_count, default=4096, help="of a text")
    parser.add_argument("--limit", metavar="N", type=_count, default=2, help="texts. Default: 2")
    parser.add_argument(
        "--question-seed", metavar="N", type=int, default=0, help="of the draw. Default: 0"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write a picture (SVG)")
    _add_output(parser)
    options.add_settings(parser)


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no count") from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def run(args: argparse.Namespace) -> int:
    """Do what is asked; see :data:`SUMMARY` for exit codes."""
    if args.entry:
        return _entry(args)
    if args.list or args.check or args.schema:
        return _catalog(args)
    todo: Mapping[str, Callable[[argparse.Namespace], int]] = {
        **dict.fromkeys(_ASKED, _ask),
        "compare": _compare,
        "logits": _logits,
        "selection": _selection,
    }
    if args.what is None:
        raise ConfigError(
            "nothing to do", remedy="name a task, or --entry NAME; `minuet eval --help` lists both"
        )
    return todo[args.what](args)


# --- the catalog ---------------------------------------------------------------------------------


def _catalog(args: argparse.Namespace) -> int:
    from minuet.evals import catalog, show

    folder = args.catalog or catalog.FOLDER
    if args.schema:
        _write([catalog.schema()])
        return 0
    entries = catalog.load(folder)
    if args.list:
        _write(show.entries(entries.values()))
        return 0
    faults = catalog.check(folder)
    for name, said in faults.items():
        sys.stderr.writelines(f"{name}: {fault}\n" for fault in said)
    sys.stderr.write(f"{len(entries)} entries, {len(faults)} with faults\n")
    return 1 if faults else 0


def _entry(args: argparse.Namespace) -> int:
    from minuet.evals import catalog, entries, show
    from minuet.evals.compare import Comparison
    from minuet.evals.logits import Divergence
    from minuet.evals.run import Report

    folder = args.catalog or catalog.FOLDER
    entry = catalog.find(args.entry, folder)
    outcome = entries.run_entry(entry, _means(args, entry.name), folder)
    if getattr(args, "json", False):
        _write([json.dumps(outcome.as_json(), indent=2, ensure_ascii=False)])
    else:
        detail = outcome.detail
        if isinstance(detail, Report):
            _write(show.report(detail, str(_out(args, entry.name))))
        elif isinstance(detail, Comparison):
            _write(show.comparison(detail, _SHOWN))
        elif isinstance(detail, Divergence):
            _write(show.divergences([("all tokens", detail)]))
        _write([f"{'passed' if outcome.passed else 'FAILED'}  {entry.name}: {outcome.said}"])
    return 0 if outcome.passed else 1


# --- asking --------------------------------------------------------------------------------------


def _ask(args: argparse.Namespace) -> int:
    from minuet.evals import entries, show
    from minuet.evals.records import Records
    from minuet.evals.run import ask_all, describe

    task, means = _task(args, args.what), _means(args, args.what)
    records = Records(means.out)
    with entries.server_for(means, _model(args), {}) as server:
        made = describe(task, server, _sampling(args))
        report = ask_all(
            task, server, made, records, concurrency=means.concurrency, progress=means.progress
        )
    if getattr(args, "json", False):
        _write([json.dumps(report.as_json(), indent=2, ensure_ascii=False)])
    else:
        _write(show.report(report, str(means.out)))
        _write(show.wrong(report.answers, made.metric, _SHOWN))
    return 1 if report.errors else 0


def _logits(args: argparse.Namespace) -> int:
    from minuet.evals import entries, logits
    from minuet.evals.records import Records
    from minuet.evals.run import Sampling, describe

    name = f"logits-{args.task}"
    task, means = _task(args, args.task, default=8), _means(args, name)
    records = Records(means.out)
    with entries.server_for(means, _model(args), {}) as server:
        made = logits.as_run(describe(task, server, Sampling()), args.top)
        texts = logits.score_all(task, server, made, records, top=args.top, progress=means.progress)
    failed = [text for text in texts if text.error]
    tokens = sum(len(text.token_ids) for text in texts)
    _write([f"{len(texts) - len(failed)} texts, {tokens} tokens: {means.out}@{made.key}"])
    _write(f"not scored: {text.id}: {text.error}" for text in failed[:3])
    return 1 if failed else 0


def _task(args: argparse.Namespace, name: str, default: int = _COUNT) -> "Task":
    from minuet.evals import questions

    limit = getattr(args, "limit", None)
    if name == "gsm8k":
        data = getattr(args, "data", None)
        if data is None:
            raise ConfigError("gsm8k needs its questions", remedy="name a JSONL file with --data")
        return questions.gsm8k_task(
            data,
            fewshot_data=getattr(args, "fewshot_data", None),
            fewshot=getattr(args, "fewshot", 5),
            chat=getattr(args, "chat", False),
            limit=limit,
        )
    count = default if limit is None else limit
    chosen = dict(_option(text) for text in args.option)
    return questions.generated(name, seed=args.question_seed, count=count, **chosen)


def _option(text: str) -> tuple[str, Any]:
    name, mark, value = text.partition("=")
    try:
        return name, json.loads(value) if mark else True
    except ValueError:
        raise ConfigError("bad value for --option", got=text, expected="NAME=JSON") from None


def _sampling(args: argparse.Namespace) -> "Sampling":
    from minuet.evals.run import Sampling

    return Sampling(
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        seed=args.sampling_seed,
        chat_template_kwargs=args.chat_template_kwargs,
    )


def _means(args: argparse.Namespace, name: str) -> "Means":
    from minuet.evals.entries import Means

    quiet, base_url = getattr(args, "quiet", False), getattr(args, "base_url", "")
    words = _serve_words(args)
    if base_url and words:
        raise ConfigError(
            "a server that runs already takes no flags",
            got=" ".join(words),
            expected="none",
            remedy="leave them out, or leave out --base-url to have a server started with them",
        )

    def announce(line: str) -> None:
        if not quiet:
            sys.stderr.write(line + "\n")

    return Means(
        out=_out(args, name),
        announce=announce,
        base_url=base_url,
        api_key=getattr(args, "api_key", ""),
        words=words,
        model=getattr(args, "model", None) or getattr(args, "model_name", None) or "",
        data=getattr(args, "data", None),
        fewshot_data=getattr(args, "fewshot_data", None),
        limit=getattr(args, "limit", None),
        concurrency=getattr(args, "concurrency", 8),
        progress=not quiet and sys.stderr.isatty(),
    )


def _out(args: argparse.Namespace, name: str) -> Path:
    given: Path | None = getattr(args, "out", None)
    return given or Path(_OUT) / f"{name}.jsonl"


def _model(args: argparse.Namespace) -> str:
    """What to serve; nothing is, where a server is named."""
    if getattr(args, "base_url", ""):
        return ""
    model: str = options.read(args)["model"]
    return model


def _serve_words(args: argparse.Namespace) -> list[str]:
    """The engine's flags as they were given, for the command line of a server of our own."""
    words: list[str] = list(args.flags)
    if getattr(args, "config", None):
        words += ["--config", str(args.config)]
    for setting in SETTINGS:
        value = getattr(args, setting.name, None)
        if value is None or setting.name in ("model", "api_key"):
            continue
        if setting.is_switch:
            words.append(setting.flag if value else "--no-" + setting.flag.removeprefix("--"))
        else:
            words += [setting.flag, str(value)]
    return words


# --- comparing -----------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from minuet.evals import compare, logits, show

    first, second = _run_of(args.first), _run_of(args.second)
    if first[1].metric == logits.METRIC or second[1].metric == logits.METRIC:
        return _compare_logits(args, first, second)
    measure, judged = ((made, records.answered(made.key)) for records, made in (first, second))
    found = compare.compare(measure, judged, args.metric)
    if getattr(args, "json", False):
        _write([json.dumps(found.as_json(), indent=2, ensure_ascii=False)])
    else:
        _write(show.comparison(found, args.most))
    return 0


def _compare_logits(
    args: argparse.Namespace, first: "tuple[Records, Run]", second: "tuple[Records, Run]"
) -> int:
    from minuet.evals import logits, show

    texts = [records.texts(made.key).values() for records, made in (first, second)]
    found = {
        name: logits.divergence(*texts, answers_only=only)
        for name, only in (("all tokens", False), ("answers", True))
    }
    if getattr(args, "json", False):
        _write([json.dumps({name: d.as_json() for name, d in found.items()}, indent=2)])
    else:
        _write(show.divergences(list(found.items())))
    return 0


def _run_of(text: str) -> "tuple[Records, Run]":
    from minuet.evals.records import Records

    name, _, run_key = text.partition("@")
    if not Path(name).is_file():
        raise ConfigError("no such file of results", got=name, expected="FILE or FILE@RUN")
    records = Records(Path(name))
    return records, records.find(run_key)


# --- the selection -------------------------------------------------------------------------------


def _selection(args: argparse.Namespace) -> int:
    from minuet.config import read_options

    flags = {setting.name: getattr(args, setting.name, None) for setting in SETTINGS}
    chosen = options.read(args)
    # rows that come from the cache are not computed, and what is not computed cannot be watched
    fixed = {"model": chosen["model"], "arch": "cpu", "enable_prefix_caching": False}
    settled = read_options({**flags, **fixed}, args.config)

    from minuet.evals import selection, show
    from minuet.evals.plot import selection_svg

    def texts(engine: "Engine") -> Sequence[Sequence[int]]:
        return selection.needle_texts(
            engine, seed=args.question_seed, count=args.limit, length=args.length
        )

    found = selection.audit(settled, texts, _means(args, "selection").announce).as_json()
    if args.plot:
        args.plot.write_text(selection_svg(found), encoding="utf-8")
    if getattr(args, "json", False):
        _write([json.dumps(found, indent=2)])
    else:
        _write(show.selection(found))
    return 0


def _write(lines: Iterable[str]) -> None:
    sys.stdout.writelines(line + "\n" for line in lines)
