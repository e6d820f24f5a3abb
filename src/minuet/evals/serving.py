"""A server of our own for the length of an evaluation: ``minuet serve`` in a child process."""

import contextlib
import hashlib
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from minuet.errors import MinuetError
from minuet.evals.records import key_of
from minuet.models import registry

_LISTENING = re.compile(r"serving .* on (http://\S+)")
_START_S = 1800.0  # large checkpoints load for minutes; a start that fails ends the process at once
_STOP_S = 30.0
_KEPT_LINES = 40
_HASHED_BYTES = 64 * 2**20


def weights_of(model: str) -> str:
    """Names the content of a checkpoint, so that answers of another one are not taken for its own.

    Small files are hashed; of large ones name, size and time of change have to do.

    Args:
        model: as ``minuet serve`` takes it.

    Raises:
        ConfigError: no such model.
    """
    source = registry.find(model)
    facts: list[object] = [source.config]
    for path in sorted(source.folder.glob("*.safetensors")) if source.folder else ():
        stat = path.stat()
        small = stat.st_size <= _HASHED_BYTES
        facts.append([path.name, _digest(path) if small else [stat.st_size, stat.st_mtime_ns]])
    return key_of(facts)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(words: Sequence[str], announce: Callable[[str], None]) -> Iterator[str]:
    """Run ``minuet serve`` on a free port and end it afterwards.

    Args:
        words: model and flags, as on the command line.
        announce: receives each line the server logs while it starts.

    Yields:
        Its base URL, once it listens.

    Raises:
        MinuetError: it ended before it listened; with what it said last.
    """
    command = [sys.executable, "-m", "minuet", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    found: list[str] = []
    told = threading.Event()
    last: deque[str] = deque(maxlen=_KEPT_LINES)

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:  # to its end: a full pipe would stop the server
            last.append(line.rstrip())
            if not told.is_set():
                announce(line.rstrip())
            if not found and (listening := _LISTENING.search(line)):
                found.append(listening[1])
                told.set()
        told.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        told.wait(_START_S)
        if not found:
            raise MinuetError(_failure(process, reader, last))
        yield found[0]
    finally:
        _end(process)
        reader.join(5)
        if process.stderr is not None:
            process.stderr.close()


def _failure(process: subprocess.Popen[str], reader: threading.Thread, last: deque[str]) -> str:
    if process.poll() is None and reader.is_alive():
        return f"the server did not listen within {_START_S:.0f} s"
    code = process.wait()
    said = [line for line in last if line.startswith("minuet: error: ")]
    reason = "\n".join(list(last)[list(last).index(said[0]) :] if said else list(last)[-5:])
    return f"the server ended with code {code}: {reason.removeprefix('minuet: error: ')}"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
