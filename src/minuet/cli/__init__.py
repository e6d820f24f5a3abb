"""The ``minuet`` command: a table of sub-commands, each imported only when it is asked for.

A sub-command is a module with ``SUMMARY``, ``EXAMPLES``, ``add_arguments(parser)`` and
``run(args) -> int``. Exit codes: 0 done, 1 failed while running, 2 asked for something that cannot
be served or does not exist. Results go to stdout, everything else to stderr.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from minuet.errors import ConfigError, ContractError, MinuetError, RefusedError

# name -> module; one line adds a sub-command
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "serve": "minuet.cli.serve",
        "generate": "minuet.cli.generate",
        "explain": "minuet.cli.explain",
        "bench": "minuet.cli.bench",
        "eval": "minuet.cli.eval",
        "env": "minuet.cli.env",
    }
)


class Parser(argparse.ArgumentParser):
    """Errors of one line: what is wrong, and what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Leave with one line.

        Raises:
            ConfigError: always; :func:`main` prints it and returns 2.
        """
        raise ConfigError(message, remedy=self._help_hint)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, and refuse what is left over with the nearest known flag.

        Raises:
            ConfigError: an unknown flag, a missing value, a word too many.
        """
        args, rest = self.parse_known_args(argv)
        if not rest:
            return args
        unknown = next((word for word in rest if word.startswith("-")), "")
        if not unknown:
            raise ConfigError(f"unexpected argument {rest[0]!r}", remedy=self._help_hint)
        name = unknown.partition("=")[0]
        near = difflib.get_close_matches(name, self._known_flags(), n=1)
        hint = f"did you mean {near[0]}?" if near else self._help_hint
        raise ConfigError(f"unknown flag {name}", remedy=hint)

    def _known_flags(self) -> list[str]:
        """Own flags, and those of sub-commands."""
        flags = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                flags += [f for sub in action.choices.values() for f in sub._option_string_actions]
        return flags

    @property
    def _help_hint(self) -> str:
        return f"`{self.prog} --help` shows every flag"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Args:
        argv: words after ``minuet``; None takes those of the process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except (ConfigError, ContractError) as problem:
        return _fail(problem, 2)
    except RefusedError as problem:
        return _fail(problem, 2)
    except MinuetError as problem:
        return _fail(problem, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader left (`minuet explain | head`); keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(problem: Exception, code: int) -> int:
    sys.stderr.write(f"minuet: error: {problem}\n")
    return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        from minuet import __version__

        sys.stdout.write(f"minuet {__version__}\n")
        return 0
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(
            f"no command {name!r}",
            remedy=f"did you mean `minuet {near[0]}`?" if near else "`minuet --help` lists them",
        )
    module = importlib.import_module(COMMANDS[name])
    parser = Parser(
        prog=f"minuet {name}",
        usage=f"minuet {name} [flags]",
        description=module.SUMMARY,
        epilog=module.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    code: int = module.run(parser.parse_all(words[1:]))
    sys.stdout.flush()
    return code


def _overview() -> str:
    lines = ["usage: minuet COMMAND [flags]", "", "commands:"]
    for name, module in COMMANDS.items():
        lines.append(f"  {name:<10} {importlib.import_module(module).SUMMARY.splitlines()[0]}")
    lines += [
        "",
        "`minuet COMMAND --help` explains one of them; start with `minuet explain minimax-m3`",
        "",
    ]
    return "\n".join(lines)
