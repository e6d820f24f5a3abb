"""T5: the generated pages say what the code does, for every arch, flag and variable."""

import ast
import re
from pathlib import Path

import pytest

import minuet
from minuet import docs, env
from minuet.attention import dispatch
from minuet.attention.backends import NAMES, capabilities
from minuet.attention.capability import Level
from minuet.config import Config, config_field_names
from minuet.planning.execution import plan_or_refuse
from minuet.planning.kernels import choose_kernels
from minuet.planning.resolve import resolve_or_refuse
from minuet.platform.arch import ARCHS, get
from minuet.settings import SETTINGS
from tests.planning.helpers import PLENTY, preset

SOURCES = sorted(Path(minuet.__file__).parent.rglob("*.py"))
FOLDER = docs.FOLDER


def rows(page: str, header: str) -> dict[str, list[str]]:
    """The rows of the table whose header begins with a word: first cell to the others."""
    lines = page.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    found = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
        found[first] = others
    return found


# --- T5a -----------------------------------------------------------------------------------------


def test_the_pages_are_what_would_be_written():
    assert docs.stale(FOLDER) == {}
    assert docs.main(["--check"]) == 0


def test_a_changed_page_is_found_and_written_again(tmp_path, capsys):
    assert docs.main(["--write", "--folder", str(tmp_path)]) == 0
    assert docs.main(["--check", "--folder", str(tmp_path)]) == 0
    page = tmp_path / "flags.md"
    page.write_text(page.read_text().replace("`--seed`", "`--sead`"))
    assert docs.main(["--check", "--folder", str(tmp_path)]) == 1
    assert "-| `--sead`" in capsys.readouterr().err
    (tmp_path / "env.md").unlink()
    assert set(docs.stale(tmp_path)) == {"flags.md", "env.md"}


# --- T5b -----------------------------------------------------------------------------------------

OUTCOMES = rows((FOLDER / "support-matrix.md").read_text(), "asked for")


@pytest.mark.parametrize("demand", docs._demands(), ids=lambda demand: demand.title)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_documented_outcome_is_what_dispatch_does(demand, arch):
    """Asked of dispatch itself, not of the function that wrote the page."""
    cell = OUTCOMES[demand.title][list(ARCHS).index(arch)]
    facts = docs.dense_only(preset()) if demand.dense_only else preset()
    options = docs.defaults(**{"max_model_len": 2048, **demand.settings})
    config, _ = resolve_or_refuse(options, facts, get(arch))
    if config is None:
        assert cell.startswith("refused")
        return
    kernels, refusals = choose_kernels(config, facts, get(arch), demand.features)
    if refusals:
        assert cell.startswith("refused")
        return
    chosen = {
        dispatch.choose(choice.problem, get(arch), config.attention_backend).kernel
        for choice in kernels.choices.values()
    }
    (backend,) = {kernel.backend for kernel in chosen}
    declared = any(not kernel.runs_on(get(arch)) for kernel in chosen)
    assert cell == f"`{backend}`" + (" (declared)" if declared else "")


@pytest.mark.parametrize("demand", docs._demands(), ids=lambda demand: demand.title)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_documented_way_out_is_one(demand, arch):
    cell = OUTCOMES[demand.title][list(ARCHS).index(arch)]
    facts = docs.dense_only(preset()) if demand.dense_only else preset()
    names = {flag: s.name for s in SETTINGS for flag in s.flags}
    for flag, value in re.findall(r"`(--[a-z-]+) ([^`]+)`", cell):
        asked = {"max_model_len": 2048, **demand.settings, names[flag]: value}
        options = docs.defaults(**asked)
        _, before = plan_or_refuse(
            docs.defaults(**{"max_model_len": 2048, **demand.settings}),
            facts,
            get(arch),
            device_bytes=PLENTY,
            features=demand.features,
        )
        _, after = plan_or_refuse(
            options, facts, get(arch), device_bytes=PLENTY, features=demand.features
        )
        removed = [r for r in before if (r.flag, r.value) == (flag, value)]
        assert removed
        assert not set(removed) & set(after)


def test_the_level_of_each_kernel_and_arch_is_documented():
    page = (FOLDER / "support-matrix.md").read_text()
    levels = rows(page, "kernel")
    for name in NAMES:
        for kernel in capabilities(name):
            for arch, cell in zip(ARCHS, levels[f"`{kernel.name}`"], strict=True):
                level = kernel.level.get(arch)
                assert cell == ("-" if level is None else level.name.lower())
    assert set(rows(page, "level")) == {f"`{level.name.lower()}`" for level in Level}


# --- T5c -----------------------------------------------------------------------------------------


def test_every_flag_is_documented_with_its_default_and_nothing_else_is():
    page = (FOLDER / "flags.md").read_text()
    documented = {}
    for line in page.splitlines():
        if line.startswith("| `--"):
            flags, default, *_ = (cell.strip() for cell in line.strip("| ").split(" | "))
            documented[tuple(re.findall(r"`([^`]+)`", flags))] = default.strip("`")
    expected = {}
    for setting in SETTINGS:
        flags = setting.flags
        if setting.is_switch:
            flags = (*flags, *(f"--no-{flag[2:]}" for flag in setting.flags))
        shown = docs.shown_default(setting)
        expected[flags] = shown or "-"
    assert documented == expected


def test_every_setting_is_a_field_of_the_config_and_vice_versa():
    assert config_field_names() == tuple(setting.name for setting in SETTINGS)
    assert "sources" in Config.__dataclass_fields__


def test_every_variable_is_documented_with_its_default_and_nothing_else_is():
    table = rows((FOLDER / "env.md").read_text(), "variable")
    assert {name.strip("`"): cells[0].strip("`") for name, cells in table.items()} == {
        variable.name: variable.default or "unset" for variable in env.VARIABLES
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_environment_is_read_in_one_place_and_by_documented_names(path):
    tree = ast.parse(path.read_text())
    assert not environment_reads(tree) or path.name == "env.py"
    known = {variable.name for variable in env.VARIABLES}
    assert variable_names(tree) <= known, path


def environment_reads(tree: ast.AST) -> list[str]:
    used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    imported = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    names = ("os.environ", "os.getenv", "os.environb")
    return [name for name in used + imported if name.startswith(names)]


def variable_names(tree: ast.AST) -> set[str]:
    """Strings that are the name of one of our variables."""
    constants = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {text for text in constants if re.fullmatch(r"MINUET_[A-Z_]+", text)}


def test_the_rules_see_what_they_forbid():
    for source in (
        "import os\nos.environ['X']",
        "import os\nos.getenv('X')",
        "from os import environ",
    ):
        assert environment_reads(ast.parse(source))
    assert variable_names(ast.parse("x = 'MINUET_SECRET_SWITCH'")) == {"MINUET_SECRET_SWITCH"}


def test_every_variable_is_read_into_a_field():
    assert {variable.field for variable in env.VARIABLES} == set(env.Values.__dataclass_fields__)
