"""Results as text for a terminal. Plain columns: they go to files and issues as they are."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from minuet.evals.catalog import Accuracy, Benchmark, Entry, Logits, Paired
from minuet.evals.compare import Comparison
from minuet.evals.logits import Divergence
from minuet.evals.records import Answer
from minuet.evals.run import Report, Score

_SHOWN_CHARS = 60


def report(found: Report, where: str) -> Iterator[str]:
    """A run: scores with their intervals, groups, what was cut or failed."""
    yield f"{found.run.task}: {found.run.settings['model']}"
    rows = [_score_row(metric, found.score(metric)) for metric in found.metrics]
    rows += [_score_row(f"  {group}", found.score(group=group)) for group in found.groups]
    yield from columns(("", "right", "asked", "share", "95 % interval"), rows)
    prompt = sum(a.prompt_tokens for a in found.answers)
    cached = sum(a.cached_tokens for a in found.answers)
    share = f", {cached / prompt:.0%} of the prompts from the prefix cache" if cached else ""
    yield f"{found.resumed} of {len(found.answers)} answers were there already{share}"
    cut = sum(a.finish_reason == "length" for a in found.answers)
    if cut:
        yield f"{cut} answers reached the token limit; see --max-tokens"
    for answer in found.errors[:3]:
        yield f"no answer to {answer.id}: {answer.error}"
    if len(found.errors) > 3:
        yield f"and {len(found.errors) - 3} more without an answer; run again to ask them again"
    yield f"answers: {where}@{found.run.key}"


def _score_row(name: str, score: Score) -> tuple[str, ...]:
    low, high = score.interval
    return name, str(score.right), str(score.asked), f"{score.value:.4f}", f"{low:.4f} - {high:.4f}"


def wrong(answers: Iterable[Answer], metric: str, most: int) -> Iterator[str]:
    """The first wrong answers."""
    found = [a for a in answers if not a.scores.get(metric, False)]
    for answer in found[:most]:
        yield f"  {answer.id}: expected {_short(answer.expected)}, got {_short(answer.output)}"
    if len(found) > most:
        yield f"  and {len(found) - most} more"


def comparison(found: Comparison, most: int) -> Iterator[str]:
    """Two runs: what differs between them, the four cases, the test, the discordant questions."""
    counts = found.counts
    yield f"{found.first.task}, {found.metric}: {counts.questions} questions in both runs"
    if found.unpaired:
        yield f"{found.unpaired} questions were answered by one of the runs only and are left out"
    for name, (one, two) in found.settings.items():
        yield f"  {name}: {_short(str(one))} -> {_short(str(two))}"
    rows = [
        ("first right", str(counts.both), str(counts.only_first)),
        ("first wrong", str(counts.only_second), str(counts.neither)),
    ]
    yield from columns(("", "second right", "second wrong"), rows)
    yield (
        f"difference {counts.difference:+.4f}; exact McNemar: p {counts.p_value:.4g} two-sided, "
        f"p {counts.p_loss:.4g} for a loss"
    )
    if counts.smallest_p > 0.05:
        yield (
            f"with {counts.discordant} discordant questions no outcome would be significant at "
            "0.05: ask more, or compare log-probabilities"
        )
    yield f"{found.differing} answers differ in their text"
    for one, two in found.discordant[:most]:
        yield (
            f"  {one.id}: expected {_short(one.expected)}, "
            f"first {_short(one.output)}, second {_short(two.output)}"
        )
    if len(found.discordant) > most:
        yield f"  and {len(found.discordant) - most} more discordant; --json lists them all"


def divergences(found: Sequence[tuple[str, Divergence]]) -> Iterator[str]:
    """Distributions of two runs over the same tokens."""
    rows = [
        (
            name,
            str(d.positions),
            f"{d.kl_mean:.3e}",
            f"{d.kl_max:.3e}",
            f"{d.same_top:.4f}",
            f"{d.logprob_shift:.3e}",
            f"{d.perplexity[0]:.4f} / {d.perplexity[1]:.4f}",
        )
        for name, d in found
    ]
    names = ("", "positions", "KL mean >=", "KL max >=", "same top", "|dlogprob|", "perplexity")
    yield from columns(names, rows)


def selection(found: Mapping[str, Any]) -> Iterator[str]:
    """A selection audit; see :mod:`minuet.evals.selection`."""
    yield (
        f"{found['model']}: {found['top_blocks']} blocks of {found['block_tokens']} tokens chosen, "
        f"{found['local_blocks']} of them the newest; {found['texts']} texts, "
        f"{found['tokens']} tokens"
    )
    rows = []
    for head in found["heads"]:
        marks = [_share_mark(head, depth) for depth in range(len(head["chosen_by_depth"]))]
        rows.append(
            (
                str(head["layer"]),
                str(head["kv_head"]),
                str(head["rows"]),
                f"{head['recall_mean']:.4f}",
                f"{head['recall_min']:.4f}",
                f"{head['best_mean']:.4f}",
                f"{head['window_mean']:.4f}",
                str(head["ties"]),
                str(head["differing"]),
                "".join(marks),
            )
        )
    names = ("layer", "head", "rows", "recall", "lowest", "best", "window", "ties", "differing")
    yield from columns((*names, "chosen by depth"), rows)
    shares = ", ".join(f"layer {layer} {share:.2f}" for layer, share in found["coverage"].items())
    yield f"blocks ever chosen: {shares}"


def _share_mark(head: Mapping[str, Any], depth: int) -> str:
    """A digit: tenths of the times a block of this depth could be chosen that it was."""
    reachable = head["reachable_by_depth"][depth]
    if not reachable:
        return "."
    return str(min(9, 10 * head["chosen_by_depth"][depth] // reachable))


def entries(found: Iterable[Entry]) -> Iterator[str]:
    """The catalog."""
    rows = []
    for entry in found:
        match entry:
            case Accuracy():
                rule = f"{entry.task} {entry.metric} >= {entry.at_least}"
            case Paired(identical=True):
                rule = f"answers equal those of {entry.against}"
            case Paired():
                rule = f"p >= {entry.p_at_least} against {entry.against}"
            case Logits():
                rule = f"KL <= {entry.kl_mean_at_most:g}, same top >= {entry.same_top_at_least}"
            case Benchmark():
                bounds = [f">= {entry.at_least}"] if entry.at_least is not None else []
                bounds += [f"<= {entry.at_most}"] if entry.at_most is not None else []
                rule = f"{entry.figure} {' '.join(bounds)} {entry.unit}"
        rows.append((entry.name, ",".join(entry.archs), rule, entry.summary))
    yield from columns(("entry", "archs", "passes while", "what it shows"), rows)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: numbers to the right, the first column and words to the left."""
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(head))]
    for row in table:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _is_number(cell: str) -> bool:
    return cell.replace(".", "").replace("e-", "").replace("e+", "").lstrip("-").isdigit()


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")
