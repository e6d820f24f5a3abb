"""``minuet generate``: answer prompts offline, through the real scheduler, cache and model."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from minuet.cli import options
from minuet.config import Options
from minuet.errors import ConfigError, RequestError

SUMMARY = "Answer prompts from the command line, without a server."
EXAMPLES = """examples:
  minuet generate --chat --prompt '17 * 23'
  minuet generate CHECKPOINT --prompt 'Once upon a time' --max-tokens 32
  minuet generate CHECKPOINT --prompt-token-ids 1,2,3 --logprobs 3 --json
  minuet generate CHECKPOINT --prompts-file prompts.txt --kv-cache-dtype fp8
  minuet generate minimax-m3 --load-format dummy --arch gfx950      refused, and why

A prompts file has one prompt per line: text, or a JSON object with `prompt` (text or token ids) and
any sampling field (`{"prompt": "Hi", "max_tokens": 8, "seed": 1}`), which wins over the flags.
With --chat, a text is a user's message: the model's chat template goes around it, and it is
answered in at most 256 tokens drawn as generation_config.json says, unless flags say otherwise.
With --json, one object per request goes to stdout, in the order of the prompts. Exit code 1 if a
request ended with an error; the others are answered all the same.
"""

# sampling flags: name -> (type, help); defaults are those of SamplingParams
_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "output tokens at most"),
    "min_tokens": (int, "no stop before this many output tokens"),
    "temperature": (float, "0 takes the most likely token"),
    "top_k": (int, "keep the k most likely tokens; 0 keeps all"),
    "top_p": (float, "keep the smallest set of tokens with this probability"),
    "min_p": (float, "keep tokens at least this fraction as likely as the most likely"),
    "presence_penalty": (float, "subtracted from tokens that occurred in the output"),
    "frequency_penalty": (float, "subtracted per occurrence in the output"),
    "repetition_penalty": (float, "divides logits of tokens seen in prompt or output"),
    "logprobs": (int, "report this many alternatives per output token"),
    "prompt_logprobs": (int, "report this many alternatives per prompt token"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the sub-command."""
    options.add_settings(parser)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    prompts.add_argument(
        "--prompt-token-ids",
        action="append",
        default=[],
        metavar="1,2,3",
        help="a prompt as token ids; may be repeated",
    )
    prompts.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help="a prompt per line, see below"
    )
    prompts.add_argument(
        "--chat", action="store_true", help="prompts are messages to a chat model, not bare text"
    )
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in _SAMPLING.items():
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    sampling.add_argument(
        "--stop", action="append", help="end when this text appears; may be repeated"
    )
    sampling.add_argument(
        "--stop-token-ids", metavar="1,2,3", help="end when one of these is drawn"
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", default=None, help="do not end at EOS"
    )
    sampling.add_argument(
        "--sampling-seed", type=int, help="seed of every request that brings none"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="one JSON object per request, to stdout"
    )
    output.add_argument("--quiet", action="store_true", help="no plan summary and no progress bar")


def run(args: argparse.Namespace) -> int:
    """Answer; 0, or 1 if a request ended with an error."""
    chosen = options.read(args)
    # before torch is imported: a misspelt field should not cost the seconds of loading a model
    jobs = _jobs(args)
    prompts = [prompt for prompt, _ in jobs]
    if args.chat:
        prompts = _in_template(chosen, prompts)
    usual = _chat_defaults(chosen) if args.chat else {}
    params = [_params({**usual, **wanted}) for _, wanted in jobs]

    from minuet.engine.llm import LLM
    from minuet.engine.start import start

    def announce(line: str) -> None:
        if not args.quiet:
            sys.stderr.write(line + "\n")

    llm = LLM.over(start(chosen, announce))
    outputs = llm.generate(
        prompts,
        params,
        progress=not args.quiet and sys.stderr.isatty(),
        on_error="return",
    )
    shown = [_as_json(o) for o in outputs]
    if args.json:
        sys.stdout.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in shown)
    else:
        _print(shown, jobs)
    if not args.quiet:
        announce(_totals(shown))
        announce(_sealed(llm.engine.seal.counters()))
    return 1 if any(item["finish_reason"] == "error" for item in shown) else 0


def _jobs(args: argparse.Namespace) -> list[tuple[Any, dict[str, Any]]]:
    """(prompt, sampling fields) in the order of the command line, the file last."""
    common = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.stop:
        common["stop"] = args.stop
    if args.stop_token_ids:
        common["stop_token_ids"] = _ids(args.stop_token_ids, "--stop-token-ids")
    if args.ignore_eos:
        common["ignore_eos"] = True
    if args.sampling_seed is not None:
        common["seed"] = args.sampling_seed
    prompts: list[Any] = [
        *args.prompt,
        *(_ids(t, "--prompt-token-ids") for t in args.prompt_token_ids),
    ]
    jobs = [(prompt, common) for prompt in prompts]
    if args.prompts_file:
        jobs += [(prompt, {**common, **own}) for prompt, own in _read(args.prompts_file)]
    if not jobs:
        raise ConfigError(
            "no prompt",
            remedy="give --prompt TEXT, --prompt-token-ids 1,2,3 or --prompts-file FILE",
        )
    return jobs


def _in_template(chosen: Options, prompts: list[Any]) -> list[Any]:
    """Texts as conversations of one message, in tokens; token ids stay as they are."""
    from minuet.models.tokenizer import Tokenizer
    from minuet.server import template

    folder = options.model_of(chosen).folder
    found = None
    if folder is not None:
        tokenizer = Tokenizer.load(folder)
        found = template.load(folder, "", tokenizer.added_texts, tokenizer.encode)
    if found is None:
        raise ConfigError(
            "--chat needs a model with a chat template",
            got=chosen["model"],
            expected="a folder with chat_template.jinja",
            remedy="leave --chat out, and write the template's text into the prompt",
        )
    return [
        found.render([{"role": "user", "content": prompt}]).token_ids
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _chat_defaults(chosen: Options) -> dict[str, Any]:
    """What the server would draw with: the model's own sampling, and room for an answer."""
    from dataclasses import asdict

    from minuet.models.tokenizer import read_generation_defaults

    source = options.model_of(chosen)
    stated = asdict(read_generation_defaults(source.folder, source.spec.eos_token_ids))
    sampling = {name: stated[name] for name in ("temperature", "top_p", "top_k")}
    return {"max_tokens": 256, **{k: v for k, v in sampling.items() if v is not None}}


def _ids(text: str, flag: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise ConfigError(
            f"bad value for {flag}", got=text, expected="integers separated by commas"
        ) from None


def _read(path: Path) -> list[tuple[Any, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"cannot read {path}", got=str(problem), expected="UTF-8 text") from None
    jobs: list[tuple[Any, dict[str, Any]]] = []
    for number, line in enumerate(lines, 1):
        if not line.startswith("{"):
            jobs.append((line, {}))
            continue
        try:
            item = json.loads(line)
            jobs.append((item.pop("prompt"), item))
        except (ValueError, KeyError) as problem:
            raise ConfigError(
                f"{path}:{number}",
                got=repr(problem),
                expected="text, or a JSON object with `prompt`",
            ) from None
    return jobs


def _params(wanted: dict[str, Any]) -> Any:
    from dataclasses import fields

    from minuet.engine.types import SamplingParams

    known = {f.name for f in fields(SamplingParams)}
    unknown = sorted(set(wanted) - known)
    if unknown:
        raise ConfigError("unknown sampling fields", got=unknown, expected=", ".join(sorted(known)))
    values = dict(wanted)
    for name in ("stop", "stop_token_ids"):
        if name in values:
            given = values[name]
            values[name] = (given,) if isinstance(given, str | int) else tuple(given)
    if "logit_bias" in values:
        values["logit_bias"] = {int(k): float(v) for k, v in values["logit_bias"].items()}
    try:
        return SamplingParams(**values)
    except RequestError as problem:
        raise ConfigError(f"bad sampling field: {problem}") from None


def _as_json(output: Any) -> dict[str, Any]:
    def report(item: Any) -> dict[str, Any] | None:
        if item is None:
            return None
        top = [{"token_id": i, "logprob": p} for i, p in item.top]
        return {"token_id": item.token_id, "logprob": item.logprob, "rank": item.rank, "top": top}

    def seconds(moment: float | None) -> float | None:
        return None if moment is None else round(moment - output.arrived_s, 6)

    shown: dict[str, Any] = {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason.value,
        "stop_reason": output.stop_reason,
        "cached_tokens": output.num_cached_tokens,
        "preemptions": output.num_preemptions,
        "timings": {
            "first_token_s": seconds(output.first_token_s),
            "total_s": seconds(output.finished_s),
        },
    }
    if output.error:
        shown["error"] = output.error
    for name in ("logprobs", "prompt_logprobs"):
        reports = getattr(output, name)
        if reports is not None:
            shown[name] = [report(item) for item in reports]
    return shown


def _print(shown: list[dict[str, Any]], jobs: list[tuple[Any, dict[str, Any]]]) -> None:
    for item, (prompt, _) in zip(shown, jobs, strict=True):
        asked = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"
        short = asked if len(asked) <= 60 else asked[:57] + "..."
        sys.stdout.write(f"{item['request_id']}  {short!r}\n")
        if "error" in item:
            sys.stdout.write(f"  error: {item['error']}\n")
            continue
        sys.stdout.write(f"  {item['text'] or item['token_ids']!r}\n")
        if item.get("logprobs"):
            for report in item["logprobs"]:
                alternatives = "  ".join(
                    f"{t['token_id']}:{t['logprob']:.3f}" for t in report["top"]
                )
                mine = f"{report['token_id']:>7} {report['logprob']:8.3f} rank {report['rank']}"
                sys.stdout.write(f"    {mine}  {alternatives}\n")
        ended = f", {item['stop_reason']!r}" if item["stop_reason"] is not None else ""
        sys.stdout.write(
            f"  ({len(item['token_ids'])} tokens, {item['finish_reason']}{ended}, "
            f"{item['cached_tokens']} of {len(item['prompt_token_ids'])} prompt tokens cached)\n"
        )


def _sealed(counters: Any) -> str:
    named = f" ({', '.join(counters.compiled)})" if counters.compiled else ""
    return (
        f"after ready: {counters.compilations} compilations{named}, "
        f"{counters.growth_bytes} bytes of device memory taken"
    )


def _totals(shown: list[dict[str, Any]]) -> str:
    tokens = sum(len(item["token_ids"]) for item in shown)
    longest = max((item["timings"]["total_s"] or 0.0 for item in shown), default=0.0)
    rate = f", {tokens / longest:.1f} tokens/s" if longest else ""
    return f"{len(shown)} requests, {tokens} tokens in {longest:.2f} s{rate}"
