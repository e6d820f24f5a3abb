"""How a kernel is timed on a GPU: graphs of calls, replayed in turn, beside a plain read."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

CALLS, REPLAYS = 40, 9


def captured(
    call: Callable[[int], object], sets: int, calls: int = CALLS
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls over the sets in turn, and their number."""
    calls = max(calls, sets)
    for i in range(min(sets, 3)):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    return graph, calls


def compare(
    contenders: dict[str, Callable[[int], object]],
    sets: int,
    calls: int = CALLS,
    replays: int = REPLAYS,
) -> dict[str, float]:
    """Median microseconds per call of each contender; replays alternate."""
    times = samples(contenders, sets, calls, replays)
    return {name: round(sorted(t)[len(t) // 2], 2) for name, t in times.items()}


def samples(
    contenders: dict[str, Callable[[int], object]],
    sets: int,
    calls: int = CALLS,
    replays: int = REPLAYS,
) -> dict[str, list[float]]:
    """Microseconds per call of each contender, one figure per replay; replays alternate."""
    graphs = {name: captured(call, sets, calls) for name, call in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for replay in range(replays + 1):
        for name, (graph, number) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if replay:  # the first is warm-up
                times[name].append(start.elapsed_time(end) * 1e3 / number)
    return times


@triton.jit(do_not_specialize=["first", "stretches"])
def _read(x, out, first, stretches, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    stretch = (first + program) % stretches
    seen = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(ROWS):
        seen ^= tl.load(x + (stretch * ROWS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.max(seen, 0))


def plain_read(memory: torch.Tensor, num_bytes: int, sets: int) -> Callable[[int], object]:
    """Read ``num_bytes`` in order, other bytes for each set; around the end if need be."""
    words = memory.view(torch.uint8).view(-1).view(torch.int32)
    rows, block = (1, 2048) if num_bytes < 8e6 else (8, 4096)
    programs = max(1, round(num_bytes / 4 / (rows * block)))
    stretches = words.numel() // (rows * block)
    out = torch.empty(programs, dtype=torch.int32, device=memory.device)

    def call(i: int) -> None:
        first = i * programs % stretches
        _read[(programs,)](words, out, first, stretches, ROWS=rows, BLOCK=block, num_warps=8)

    return call


def ceilings(memory: torch.Tensor) -> dict[str, float]:
    """Read and copy bandwidth in TB/s, the best this process sees."""
    words = memory.view(torch.uint8).view(-1).view(torch.int32)
    target = torch.empty_like(words)
    size = words.numel() * 4
    read = plain_read(memory, size, 1)
    times = compare({"read": read, "copy": lambda i: target.copy_(words)}, 1)
    return {
        "read_tbs": round(size / times["read"] / 1e6, 3),
        "copy_tbs": round(2 * size / times["copy"] / 1e6, 3),
    }


def header(command: list[str], method: str) -> dict[str, object]:
    """What the numbers were measured with."""

    def output(*args: str) -> str:
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    clocks = output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "card": torch.cuda.get_device_name(),
        "driver": driver,
        "clocks_at_start": clocks,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(Path(word).name if "/" in word else word for word in command),
        "method": method,
    }
