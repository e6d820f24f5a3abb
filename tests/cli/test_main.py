"""The command line as such: sub-commands, errors in one line, flags from the settings."""

import argparse
import importlib
import json

import pytest

from minuet import env
from minuet.cli import COMMANDS, Parser, main
from minuet.cli import options as cli_options
from minuet.config import Source
from minuet.errors import ConfigError
from minuet.models.registry import names
from minuet.settings import DEFAULT_MODEL, SETTINGS


def error(capsys, *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="test", allow_abbrev=False)
    cli_options.add_settings(parser)
    return parser.parse_all(words)


# --- errors --------------------------------------------------------------------------------------


def test_an_unknown_flag_names_the_nearest_one(capsys):
    line = error(capsys, "explain", "minimax-m3", "--kv-cache-type", "fp8")
    assert "--kv-cache-type" in line
    assert "did you mean --kv-cache-dtype?" in line


def test_a_flag_nobody_can_guess_points_to_the_help(capsys):
    assert "`minuet explain --help`" in error(capsys, "explain", "minimax-m3", "--zzzzzzzz")


def test_a_prefix_of_a_flag_is_not_that_flag(capsys):
    assert "unknown flag --max-model" in error(capsys, "explain", "minimax-m3", "--max-model", "1")


def test_a_value_that_does_not_parse_says_what_does(capsys):
    line = error(capsys, "explain", "minimax-m3", "--max-num-seqs", "many")
    assert "--max-num-seqs" in line
    assert "'many'" in line
    assert "8K = 8,192" in line


def test_a_missing_value_and_a_word_too_many_are_one_line(capsys):
    assert "expected one argument" in error(capsys, "explain", "--max-num-seqs")
    assert "unexpected argument 'b'" in error(capsys, "explain", "a", "b")


def test_an_unknown_command_names_the_nearest_one(capsys):
    assert "did you mean `minuet explain`?" in error(capsys, "expla")


def test_no_model_is_the_bundled_one_and_no_such_model_says_how_to_name_one(capsys):
    assert main(["explain", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings[0]["name"] == "model"
    assert (settings[0]["value"], settings[0]["source"]) == (DEFAULT_MODEL, "default")
    said = error(capsys, "explain", "nowhere")
    assert "no such model" in said
    assert all(name in said for name in names())
    assert "two models" in error(capsys, "explain", "a", "--model", "b")


def test_an_unknown_arch_lists_the_table(capsys):
    assert "gfx1250" in error(capsys, "explain", "minimax-m3", "--arch", "sm1")


def test_a_bad_environment_variable_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("MINUET_ARHC", "sm90")
    env.values.cache_clear()
    try:
        assert "MINUET_ARHC" in error(capsys, "explain", "minimax-m3")
    finally:
        monkeypatch.undo()
        env.values.cache_clear()


def test_a_reader_that_leaves_is_no_traceback():
    from tests.cli.helpers import minuet as run

    done = run("explain", "--help")
    assert done.returncode == 0
    import os
    import subprocess
    import sys

    clean = {k: v for k, v in os.environ.items() if not k.startswith("MINUET_")}
    command = f"{sys.executable} -m minuet explain minimax-m3 --arch cpu | head -1 >/dev/null"
    left = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=clean, timeout=60, check=False
    )
    assert left.stderr == ""


# --- help ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--help",), ("help",)])
def test_the_overview_names_every_command_with_its_summary(capsys, words):
    assert main(words) == 0
    text = capsys.readouterr().out
    for name, module in COMMANDS.items():
        assert name in text
        assert importlib.import_module(module).SUMMARY.splitlines()[0] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_teaches_by_examples(capsys, name):
    with pytest.raises(SystemExit) as left:
        main((name, "--help"))
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"minuet {name}" in text


def test_the_version(capsys):
    import minuet

    assert main(("--version",)) == 0
    assert capsys.readouterr().out == f"minuet {minuet.__version__}\n"


# --- flags from settings -------------------------------------------------------------------------


@pytest.mark.parametrize("server", [False, True])
def test_every_setting_has_its_flags_in_its_group_and_nothing_else_has(server):
    parser = argparse.ArgumentParser(add_help=False)
    cli_options.add_settings(parser, server=server)
    there = {}
    for group in parser._action_groups:
        for action in group._group_actions:
            for flag in action.option_strings:
                there[flag] = group.title
    settings = [s for s in SETTINGS if server or s.group != "server"]
    expected = {flag: s.group for s in settings for flag in s.flags}
    expected |= {"--no-" + flag[2:]: s.group for s in settings if s.is_switch for flag in s.flags}
    del there["--config"]
    assert there == expected


def test_a_flag_that_is_not_given_leaves_the_default_and_its_source():
    options = cli_options.read(parsed("minimax-m3"))
    for setting in SETTINGS:
        if setting.name not in ("model", "arch", "attention_backend"):  # variables may set these
            assert options[setting.name] == setting.default
            assert options.sources[setting.name] is Source.DEFAULT


def test_aliases_switches_and_units():
    options = cli_options.read(
        parsed(
            "minimax-m3",
            "--page-size=128",
            "-tp",
            "4",
            "--context-length",
            "128K",
            "--no-enable-prefix-caching",
            "--enforce-eager",
            "--kv-cache-memory",
            "2GiB",
        )
    )
    assert options["block_size"] == 128
    assert options["tensor_parallel_size"] == 4
    assert options["max_model_len"] == 131_072
    assert options["enable_prefix_caching"] is False
    assert options["enforce_eager"] is True
    assert options["kv_cache_memory"] == 2**31


def test_a_flag_wins_over_a_file_and_a_file_over_the_environment(tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text('arch = "gfx950"\nmax-num-seqs = 8\nblock-size = 128\n')
    with env.override(MINUET_ARCH="sm90", MINUET_FORCE_BACKEND="cpu"):
        options = cli_options.read(
            parsed("minimax-m3", "--config", str(settings), "--max-num-seqs", "16")
        )
    assert (options["arch"], options.sources["arch"]) == ("gfx950", Source.FILE)
    assert (options["max_num_seqs"], options.sources["max_num_seqs"]) == (16, Source.FLAG)
    assert options.sources["attention_backend"] is Source.ENV
    settings.write_text("max_num_seks = 8\n")
    with pytest.raises(ConfigError, match="max_num_seks"):
        cli_options.read(parsed("minimax-m3", "--config", str(settings)))


def test_the_arch_is_the_one_named_or_the_one_found(monkeypatch):
    from minuet.platform import detect
    from minuet.platform.arch import get

    monkeypatch.setattr(detect, "detect", lambda: get("sm100"))
    with env.override(MINUET_ARCH=""):
        assert cli_options.arch_of(cli_options.read(parsed("minimax-m3"))).name == "sm100"
        named = cli_options.read(parsed("minimax-m3", "--arch", "gfx942"))
    assert cli_options.arch_of(named).name == "gfx942"


# --- minuet env ----------------------------------------------------------------------------------


def test_env_prints_every_variable_with_its_value(capsys):
    with env.override(MINUET_ARCH="gfx950"):
        assert main(("env",)) == 0
        text = capsys.readouterr().out
        assert main(("env", "--json")) == 0
        found = json.loads(capsys.readouterr().out)
    for variable in env.VARIABLES:
        assert variable.name in text
    assert "gfx950" in text
    values = {v["name"]: v["value"] for v in found["variables"]}
    assert values["MINUET_ARCH"] == "gfx950"
    assert found["packages"]["numpy"]
