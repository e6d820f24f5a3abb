"""500 clients against the CPU engine, with random aborts: everyone is answered or refused properly.

Each client loops: a random prompt, length and mode (stream or not); a third of them leave at a
random moment. Counted are the answers by status, streams that ended without a proper end, and, at
the end, pages still held and the growth of both processes.

    python benchmarks/server_overload.py --seconds 300 --output FILE.json
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import httpx  # noqa: E402
from tests.server.conftest import running  # noqa: E402

from minuet.bench.record import header  # noqa: E402
from minuet.models.m3.export import make_checkpoint  # noqa: E402

_ABORTED = "left by the client"


async def client(session: httpx.AsyncClient, url: str, until: float, seen: Counter) -> None:
    """One client, until the time is over."""
    while time.perf_counter() < until:
        leaves = random.random() < 0.33
        patience = random.uniform(0.0, 3.0) if leaves else 600.0
        try:
            async with asyncio.timeout(patience):
                seen[await request(session, url)] += 1
        except TimeoutError:
            seen[_ABORTED] += 1
        except httpx.HTTPError as problem:
            seen[f"broken: {root_cause(problem)!r}"] += 1
        await asyncio.sleep(random.uniform(0.0, 0.2))


def root_cause(problem: BaseException) -> BaseException:
    """What a library's exception stands for: whether the server or the client closed first."""
    while (inner := problem.__cause__ or problem.__context__) is not None:
        problem = inner
    return problem


async def request(session: httpx.AsyncClient, url: str) -> str:
    """One request; how it ended."""
    size = random.choice((4, 30, 200))
    body = {
        "prompt": [random.randrange(300) for _ in range(size)],
        "max_tokens": random.randint(1, 24),
        "n": random.choice((1, 1, 2)),
        "stream": random.random() < 0.6,
    }
    if not body["stream"]:
        response = await session.post(url, json=body)
        if response.status_code == 429:
            proper = "retry-after" in response.headers and "error" in response.json()
            return "429" if proper else "429 without what belongs to it"
        proper = "choices" in response.json() or "error" in response.json()
        return str(response.status_code) if proper else f"{response.status_code} without a body"
    async with session.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return str(response.status_code)
        last, failed = "", False
        async for line in response.aiter_lines():
            failed = failed or line.startswith('data: {"error"')
            last = line or last
        if failed:
            return "200, error in stream"
        return "200" if last == "data: [DONE]" else "200 without an end"


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    text = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(text) * os.sysconf("SC_PAGE_SIZE")


async def run(server, clients: int, seconds: float, memory: list) -> Counter:
    """All clients; memory is sampled on the way."""
    seen: Counter = Counter()
    until = time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    pids = {"http": server.process.pid, "engine": server.engine_pid()}
    async with httpx.AsyncClient(timeout=600, limits=limits) as session:
        url = server.url + "/v1/completions"
        tasks = [asyncio.create_task(client(session, url, until, seen)) for _ in range(clients)]
        while time.perf_counter() < until:
            await asyncio.sleep(5)
            memory.append({name: rss_bytes(pid) for name, pid in pids.items()})
        await asyncio.gather(*tasks)
    return seen


def main() -> int:
    """Run and write; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    flags = ["--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--kv-cache-pages", "4096"]
    flags += ["--max-num-queued-reqs", "300"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(Path(scratch) / "m3", preset="tiny")
        with running(folder, *flags) as server:
            memory: list = []
            seen = asyncio.run(run(server, args.clients, args.seconds, memory))
            server.until_idle()
            complaints = [line for line in server.log if not line.startswith("INFO")]
            stats, health = server.get("/stats").json(), server.get("/health").json()
    proper = {"200", "429", _ABORTED}
    half = len(memory) // 2
    growth = {
        name: max(m[name] for m in memory[half:]) - max(m[name] for m in memory[:half])
        for name in memory[0]
    }
    found = {
        **header(),
        "clients": args.clients,
        "seconds": args.seconds,
        "requests": sum(seen.values()),
        "ended": dict(sorted(seen.items())),
        "improper": {name: count for name, count in seen.items() if name not in proper},
        "pages_held_after": stats["pages"]["used"],
        "server_complaints": complaints[:20],
        "engine_restarts": health["restarts"],
        "rss_mib_first_half_max": {n: max(m[n] for m in memory[:half]) >> 20 for n in memory[0]},
        "rss_growth_second_half_mib": {name: size / 2**20 for name, size in growth.items()},
    }
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    return 1 if found["improper"] or found["pages_held_after"] or found["engine_restarts"] else 0


if __name__ == "__main__":
    sys.exit(main())
