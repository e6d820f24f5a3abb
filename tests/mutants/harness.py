"""Apply a named fault to the library, run the tests that must catch it, and see that they do.

A **mutant** is a fault that a real system had (or could have), written as a patch of one function
or constant. The tests named with it run in this process against the patched library; each of them
has to fail. A test that passes against a fault it exists for is a test that proves nothing.
"""

import ast
import contextlib
import importlib
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

import pytest

from minuet.attention import dispatch
from minuet.errors import MinuetError

# What a test that did its work fails with. Anything else is a patch that does not fit the code any
# more, and must not count as caught.
_FAILURES = (AssertionError, MinuetError, pytest.fail.Exception)


@dataclass(frozen=True)
class Killer:
    """A test that must fail.

    Attributes:
        test: ``tests.package.module:function``.
        params: fixes parameters of a parametrized test; others take all their values.
    """

    test: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        id: ``M`` and the number of the catalogue, with a letter where it can be written twice.
        fault: what is wrong, in one sentence.
        apply: patches the library; undone afterwards.
        killers: the tests that must fail.
        crashes: other exceptions that are the fault itself and not an accident of the patch.
    """

    id: str
    fault: str
    apply: Callable[[pytest.MonkeyPatch], None]
    killers: tuple[Killer, ...]
    crashes: tuple[type[BaseException], ...] = ()


# --- patches -------------------------------------------------------------------------------------


def rewritten(function: Any, old: str, new: str) -> FunctionType:
    """A function compiled again from its source with one piece of text replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    if old not in source:
        raise RuntimeError(f"{old!r} is no longer in {function.__qualname__}")
    tree = ast.parse(source.replace(old, new))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    scope = dict(function.__globals__)
    exec(compile(tree, f"<mutant of {function.__qualname__}>", "exec"), scope)
    # only the code is new: the globals stay the module's own, so that other patches are seen
    code = scope[function.__name__].__code__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def rewrite(
    monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, name: str, old: str, new: str
) -> None:
    """Replace a function of ``owner`` by a rewritten one, wherever it was imported to."""
    before = vars(owner)[name]
    after: Any
    if isinstance(before, property):
        assert before.fget is not None
        after = property(rewritten(before.fget, old, new))
    elif isinstance(before, cached_property):
        after = cached_property(rewritten(before.func, old, new))
        after.__set_name__(owner, name)
    else:
        after = rewritten(before, old, new)
        after.__kwdefaults__ = before.__kwdefaults__
    replace_everywhere(monkeypatch, owner, name, after)


def replace_everywhere(
    monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, name: str, after: Any
) -> None:
    """Set ``owner.name``, and every module attribute that holds the same object."""
    before = vars(owner)[name]
    monkeypatch.setattr(owner, name, after)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("minuet", "tests.")):
            for attribute, value in list(vars(module).items()):
                if value is before:
                    monkeypatch.setattr(module, attribute, after)


# --- running -------------------------------------------------------------------------------------


def caught(mutant: Mutant, killer: Killer) -> BaseException | None:
    """The failure of a killer under a mutant; None if it passed.

    Raises:
        RuntimeError: the patch does not fit the code any more.
    """
    module_name, _, function_name = killer.test.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    for arguments in _arguments(function, killer.params):
        with _applied(mutant) as monkeypatch:
            if "monkeypatch" in inspect.signature(function).parameters:
                arguments = {**arguments, "monkeypatch": monkeypatch}
            failure = _failure(function, arguments)
        if failure is None:
            continue
        if not isinstance(failure, (*_FAILURES, *mutant.crashes)):
            raise RuntimeError(f"{mutant.id} does not fit the code any more") from failure
        return failure
    return None


def _failure(function: Callable[..., Any], arguments: dict[str, Any]) -> BaseException | None:
    try:
        function(**arguments)
    except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001 - whatever fails a test
        return failure
    return None


@contextlib.contextmanager
def _applied(mutant: Mutant) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        dispatch.forget()
        mutant.apply(monkeypatch)
        try:
            yield monkeypatch
        finally:
            monkeypatch.undo()
            dispatch.forget()


def _arguments(function: Callable[..., Any], fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of a test's ``parametrize`` marks."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
            names = [name.strip() for name in names]
            rows = [value if len(names) > 1 else (value,) for value in mark.args[1]]
            axes.append([dict(zip(names, row, strict=True)) for row in rows])
    for combination in itertools.product(*axes):
        arguments = {name: value for part in combination for name, value in part.items()}
        if all(arguments.get(name, value) == value for name, value in fixed.items()):
            yield arguments
