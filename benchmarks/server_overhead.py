"""What the server adds to a token: HTTP, IPC, detokenising, SSE, with an engine that costs nothing.

64 streams at once, as fast as they go. A step brings one token to every stream, so the time between
two events of a stream, divided by the number of streams, is what one token costs end to end:
percentiles are over the streams. The client takes its share of the same cores, which is counted in.

    python benchmarks/server_overhead.py --output benchmarks/results/cpu/server-overhead.json
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.server.conftest import running  # noqa: E402

from minuet.bench.record import header  # noqa: E402
from minuet.models.m3.export import make_checkpoint  # noqa: E402

_TICKS = os.sysconf("SC_CLK_TCK")


async def stream(port: int, body: bytes) -> list[float]:
    """Arrival times of the events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(body)
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return times


async def load(port: int, streams: int, tokens: int, path: str) -> list[list[float]]:
    """All streams at once."""
    asked = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    if path.endswith("chat/completions"):
        asked["messages"] = [{"role": "user", "content": "x"}]
    else:
        asked["prompt"] = "x"
    content = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    body = head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content
    return await asyncio.gather(*(stream(port, body) for _ in range(streams)))


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS


def measure(server, streams: int, tokens: int, path: str) -> dict:
    """One run, after a short one that warms everything up."""
    asyncio.run(load(server.port, streams, 20, path))
    pids = {"http": server.process.pid, "engine": server.engine_pid()}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    began = time.perf_counter()
    arrivals = asyncio.run(load(server.port, streams, tokens, path))
    wall = time.perf_counter() - began
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    # the first events wait for all prompts; and a client on the same cores reads events in bursts,
    # so a stream is taken as a whole
    costs = sorted(
        1e6 * (times[-1] - times[10]) / (len(times) - 11) / streams for times in arrivals
    )
    events = sum(map(len, arrivals))
    total = streams * tokens
    return {
        "path": path,
        "streams": streams,
        "tokens": total,
        "events": events,
        "us_per_token_p50": round(statistics.median(costs), 1),
        "us_per_token_p90": round(costs[int(len(costs) * 0.9)], 1),
        "us_per_token_mean": round(1e6 * wall / total, 1),
        "cpu_us_per_token": {name: round(1e6 * s / total, 1) for name, s in used.items()},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch) / "m3", preset="tiny")
        with running(folder, "--max-num-seqs", str(args.streams), scripted=True) as server:
            runs = [
                measure(server, args.streams, args.tokens, path)
                for path in ("/v1/completions", "/v1/chat/completions")
            ]
    found = {
        **header(),
        "cpu": _cpu_name(),
        "runs": runs,
    }
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text, encoding="utf-8")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
