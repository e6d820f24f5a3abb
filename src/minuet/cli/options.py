"""Flags from data: every setting of :data:`minuet.settings.SETTINGS` becomes one, grouped.

Sub-commands that build an engine, or plan one, call :func:`add_settings` and then
:func:`read`. Nothing is defaulted or checked here: a flag that is not given stays None, and
``config.read_options`` judges the rest, so that a settings file is judged in the same words.
"""

import argparse
from pathlib import Path

from minuet.config import Options, read_options
from minuet.errors import ConfigError
from minuet.models.registry import ModelSource, find, names
from minuet.platform import arch as arch_table
from minuet.platform.arch import Arch
from minuet.settings import AUTO, SETTINGS, Setting


def add_settings(parser: argparse.ArgumentParser, *, server: bool = False) -> None:
    """Add the positional MODEL, ``--config FILE`` and a flag per setting.

    Args:
        parser: of the sub-command.
        server: include the settings of the HTTP server, which mean nothing elsewhere.
    """
    parser.add_argument(
        "model_name",
        metavar="MODEL",
        nargs="?",
        help="a checkpoint folder, a config.json, or a name: " + ", ".join(names()),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="settings from a TOML or JSON file, with the names of the flags; flags win over it",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in SETTINGS:
        if setting.group == "server" and not server:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        _add(groups[setting.group], setting)


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    text = f"{setting.help}. {describe_default(setting)}".replace("%", "%%")
    if setting.is_switch:
        group.add_argument(
            *setting.flags, dest=setting.name, action=argparse.BooleanOptionalAction, help=text
        )
        return
    # no `type` or `choices`: config.read_options says what is wrong in its own words
    group.add_argument(*setting.flags, dest=setting.name, metavar=metavar(setting), help=text)


def metavar(setting: Setting) -> str:
    """The placeholder of a value: the closed set where there is one, else the last word."""
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    return setting.name.split("_")[-1].upper()


def describe_default(setting: Setting) -> str:
    """What happens without the flag, for people."""
    if setting.is_switch:
        return f"Default: {'on' if setting.default else 'off'}"
    accepts = "" if setting.choices else f"; accepts {setting.accepts}"
    default = "none" if setting.default in ("", ()) else setting.default
    return f"Default: {default}{accepts}"


def read(args: argparse.Namespace) -> Options:
    """The options of a parsed command line, the settings file and the environment.

    Raises:
        ConfigError: a value that is not accepted, an unreadable file, or two models.
    """
    flags = {setting.name: getattr(args, setting.name, None) for setting in SETTINGS}
    if args.model_name is not None:
        if flags["model"] is not None and flags["model"] != args.model_name:
            raise ConfigError(
                "two models", got=[args.model_name, flags["model"]], expected="MODEL or --model"
            )
        flags["model"] = args.model_name
    return read_options(flags, args.config)


def model_of(options: Options) -> ModelSource:
    """The model the options name, its config read and nothing loaded.

    Raises:
        ConfigError: no such model, or a config that is not understood.
    """
    return find(options["model"])


def arch_of(options: Options) -> Arch:
    """The arch to decide for: the one named, else that of the machine's GPU, else ``cpu``.

    Raises:
        ConfigError: no such arch, or a GPU that the arch table does not know.
    """
    if options["arch"] != AUTO:
        return arch_table.get(options["arch"])
    from minuet.platform.detect import detect  # asks the driver, which only this case should

    return detect()
