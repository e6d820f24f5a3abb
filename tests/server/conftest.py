"""Servers for the tests: real processes, reached over real sockets."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
_SERVING = re.compile(r"serving .* on (http://\S+)")


@dataclass
class Server:
    """A running server.

    Attributes:
        url: where it listens.
        process: the HTTP process; the engine is its child.
        log: what it wrote to stderr.
    """

    url: str
    process: subprocess.Popen
    log: list[str] = field(default_factory=list)

    @property
    def port(self):
        return int(self.url.rpartition(":")[2])

    def get(self, path, **kw):
        return httpx.get(self.url + path, timeout=30, **kw)

    def post(self, path, body=None, **kw):
        if "content" in kw:
            return httpx.post(self.url + path, timeout=60, **kw)
        return httpx.post(self.url + path, json=body, timeout=60, **kw)

    def engine_pid(self):
        return self.get("/health").json()["ranks"][0]["pid"]

    def metric(self, name, **labels):
        """The sum of a metric's samples with these labels."""
        wanted = {f'{k}="{v}"' for k, v in labels.items()}
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if re.match(re.escape(name) + r"[{ ]", line) and all(w in line for w in wanted):
                total += float(line.rpartition(" ")[2])
        return total

    def until(self, condition, seconds=10.0):
        """Wait for a condition; the number of seconds it took."""
        began = time.perf_counter()
        while not condition():
            assert time.perf_counter() - began < seconds, "".join(self.log[-20:])
            time.sleep(0.02)
        return time.perf_counter() - began

    def until_idle(self):
        """Wait until nothing is in flight, and no page is held."""

        def is_idle():
            stats = self.get("/stats").json()
            return (stats["state"], stats["running"], stats["pages"]["used"]) == ("idle", 0, 0)

        return self.until(is_idle)


@contextlib.contextmanager
def running(folder, *flags, scripted=False):
    """A server over a checkpoint, ended at the end."""
    module = "tests.server.scripted" if scripted else "minuet"
    command = [sys.executable, "-m", module, *([] if scripted else ["serve"]), str(folder)]
    command += ["--port", "0", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}"
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    server = Server("", process)
    listening = threading.Event()

    def read():
        for line in process.stderr:
            server.log.append(line)
            if found := _SERVING.search(line):
                server.url = found[1]
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert listening.wait(60), "".join(server.log)
        assert server.url, "".join(server.log)
        server.until(lambda: _answers(server))
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(5)
        process.stderr.close()


def _answers(server):
    with contextlib.suppress(httpx.HTTPError):
        return server.get("/health").status_code == 200
    return False


@pytest.fixture(scope="session")
def tiny_folder(checkpoint):
    """A tiny checkpoint with tokenizer and chat template."""
    return checkpoint("tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    """A server over the real engine."""
    flags = ["--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--kv-cache-pages", "2048"]
    with running(tiny_folder, *flags, "--served-model-name", "tiny,alias") as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tiny_folder):
    """A server over the scripted engine."""
    flags = ["--served-model-name", "m", "--max-num-seqs", "64"]
    with running(tiny_folder, *flags, scripted=True) as server:
        yield server
