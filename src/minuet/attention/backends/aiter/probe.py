"""Whether the installed aiter has the functions that the adapter calls, in the form it calls them.

The source is parsed, not imported. Importing aiter loads torch, looks for a GPU, raises without
ROCm and may start to build extensions; a start-up that refuses must do none of that, and the
decision half of Minuet imports no torch. The signature is what is asked, not the version: aiter's
``pa_decode`` had three incompatible forms within a few months under similar version numbers.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "aiter"
MODULE = "aiter.ops.flydsl.pa_decode"  # both functions are imported from here


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the adapter passes to a function.

    Attributes:
        positional: leading parameters, in order.
        keywords: passed by name.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...]


WANTED = {
    "pa_decode": Wanted(
        (
            "output",
            "query",
            "key_cache",
            "value_cache",
            "context_lengths",
            "block_tables",
            "softmax_scale",
            "query_length",
        ),
        (
            "compute_type",
            "key_scale",
            "value_scale",
            "exp_sums",
            "max_logits",
            "temporary_output",
            "work_plan",
        ),
    ),
    "plan_pa_decode": Wanted(("context_lengths", "num_kv_heads"), ("query_length", "plan")),
}


def lacking() -> tuple[str, ...]:
    """What the installed aiter lacks, as what follows the word "no"; empty if nothing.

    The package is there: that is asked first (``Capability.requires``).
    """
    source = _source_of(MODULE)
    if source is None:
        return (f"module {MODULE}",)
    return tuple(what for name, wanted in WANTED.items() for what in _faults(source, name, wanted))


def _source_of(module: str) -> Path | None:
    """File of a module of the package, found without importing anything."""
    spec = find_spec(PACKAGE)
    parts = module.split(".")[1:]
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder, *parts).with_suffix(".py")
        if path.is_file():
            return path
    return None


def _faults(source: Path, name: str, wanted: Wanted) -> Iterator[str]:
    function = _definition(source, name)
    if function is None:
        yield f"function {MODULE}.{name}"
        return
    given = function.args
    positional = tuple(a.arg for a in (*given.posonlyargs, *given.args))
    named = {*positional[len(wanted.positional) :], *(a.arg for a in given.kwonlyargs)}
    if positional[: len(wanted.positional)] != wanted.positional:
        yield f"{name}({', '.join(wanted.positional)}, ...)"
    for keyword in wanted.keywords:
        if keyword not in named:
            yield f"parameter {keyword} of {name}"
    for unknown in _required(given) - {*wanted.positional, *wanted.keywords}:
        yield f"value for parameter {unknown} of {name}, which it requires"


def _required(given: ast.arguments) -> set[str]:
    positional = [*given.posonlyargs, *given.args]
    without = positional[: len(positional) - len(given.defaults)]
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return {a.arg for a in without} | {a.arg for a, default in pairs if default is None}


def _definition(source: Path, name: str, hops: int = 2) -> ast.FunctionDef | None:
    """The function of that name in a file, or where the file imports it from within the package."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.level and node.module and hops:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    folder = source.parents[node.level - 1]
                    path = folder.joinpath(*node.module.split(".")).with_suffix(".py")
                    return _definition(path, alias.name, hops - 1) if path.is_file() else None
    return None
