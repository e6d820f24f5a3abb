"""Prepared steps on the CPU: Triton's kernels in its interpreter, graphs that are plain calls.

Run as ``TRITON_INTERPRET=1 python -m tests.engine.prepared_on_cpu FOLDER``: the interpreter is
chosen when Triton is imported, so the test runs this in a process of its own.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minuet.attention.contract import Phase
from minuet.attention.runtime import LayerKernels, StepKernels, load
from minuet.config import read_options
from minuet.engine import selftest
from minuet.engine import start as starting
from minuet.engine.core import Core
from minuet.engine.preparation import Preparation
from minuet.engine.prepared import parts
from minuet.engine.queued import QueuedRunner
from minuet.engine.start import Engine
from minuet.engine.types import Request, SamplingParams, ScheduledRequest, Step
from minuet.errors import PreparationError
from minuet.kv.cache import KVCache
from minuet.models import registry
from minuet.models.m3.model import Model
from minuet.models.m3.weights import load_weights
from minuet.ops.table import ops_for
from minuet.planning.execution import plan_for
from minuet.planning.shapes import shape_set
from minuet.platform.arch import get
from minuet.platform.device import Facility, Host
from tests.engine.desk import answer, token_ids

HOST = torch.device("cpu")
SETTINGS = {
    "arch": "sm90",
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "cudagraph_capture_sizes": "3",
    "kv_cache_pages": 40,
}


class Desk:
    """An engine whose GPU is the CPU."""

    def __init__(
        self,
        folder: Path,
        *,
        wrap: Callable[[StepKernels], StepKernels] = lambda kernels: kernels,
        device: Facility | None = None,
        **settings: object,
    ):
        options = read_options({"model": str(folder), **SETTINGS, **settings})
        self.source = registry.find(str(folder))
        # few compute units: work is divided over as many programs, which run one after another here
        arch = replace(get("sm90"), compute_units=3)
        self.plan = plan_for(options, self.source.facts, arch, device_bytes=2**34)
        self.cache = KVCache(self.plan.layer_layouts(), self.plan.memory.num_pages, HOST)
        self.recorder = selftest.Recorder()
        kernels = self.recorder.over(wrap(load(starting._one_kernel_each(self.plan))))
        dtype = self.plan.config.dtype
        weights = load_weights(folder, self.source.spec, dtype, HOST)
        self.model = Model(self.source.spec, weights, kernels, ops_for("reference"))
        self.laps: list[str] = []
        self.preparation = Preparation(
            self.model,
            self.cache,
            self.plan,
            kernels,
            self.recorder,
            device or Host(HOST),
        )

    def engine(self) -> Engine:
        runner = self.preparation.run(self.laps.append)
        limits = starting._limits(self.plan, self.source)
        core = Core(starting._scheduler(self.plan, self.source), runner, limits, None)
        return Engine(core, self.plan, self.source, None, {}, runner, runner.seal)


def greedy_prompts(vocab: int) -> list[list[int]]:
    """Lengths around a page, and one beyond what a row may select."""
    return [token_ids(n, vocab, seed=n) for n in (1, 17, 41)]


def check_answers(folder: Path) -> Iterator[str]:
    on_cpu = starting.start(
        read_options({"model": str(folder), **SETTINGS, "arch": "cpu"}), lambda line: None
    )
    desk = Desk(folder)
    prepared = desk.engine()
    assert desk.laps == ["reserve", "prepare", "self-test"], desk.laps
    prompts = greedy_prompts(desk.plan.facts.vocab)
    got = answer(prepared, prompts, max_tokens=3)
    wanted = answer(on_cpu, prompts, max_tokens=3)
    same = sum(a == b for a, b in zip(got, wanted, strict=True))
    assert same >= len(prompts) - 1, (got, wanted)  # a tie may break apart in 16 bits
    yield "answers"
    # prompts longer than a step: their log-probabilities come in pieces of a rung
    reports = [prompt_logprobs(engine, prompts[2]) for engine in (prepared, on_cpu)]
    assert len(reports[0]) == len(prompts[2]) - 1
    difference = torch.tensor(reports[0]) - torch.tensor(reports[1])
    assert float(difference.abs().median()) < 0.05, difference
    yield "log-probabilities of a prompt"


def prompt_logprobs(prepared: Engine, prompt: list[int]) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    output = prepared.core.add("reported", prompt, params)
    while prepared.core.has_work:
        prepared.core.step()
    assert output.prompt_logprobs is not None
    return [report.logprob for report in output.prompt_logprobs if report is not None]


def check_drafts(folder: Path) -> Iterator[str]:
    """Shares with fewer drafts than the shape give the rows of their own tokens."""
    desk = Desk(folder, num_speculative_tokens=2, kv_cache_dtype="fp8")
    runner = desk.engine().runner
    ids = token_ids(20, desk.plan.facts.vocab)
    whole = _logits(runner, [_request(ids, pages=[3, 2])], [(0, 20)])
    fresh = [_request(ids, pages=[5, 4]), _request(ids, pages=[7, 6])]
    for request in fresh:
        _logits(runner, [request], [(0, 17)])
    for request, drafts in zip(fresh, (2, 1), strict=True):
        request.prompt_token_ids = tuple(ids[:18])
        request.draft_token_ids = ids[18 : 18 + drafts]
    rows = _logits(runner, fresh, [(17, 3), (17, 2)], decodes=2)
    wanted = torch.cat([whole[17:20], whole[17:19]])
    assert rows.shape == wanted.shape, rows.shape
    cosine = torch.nn.functional.cosine_similarity(rows, wanted, dim=-1)
    assert float(cosine.min()) > 0.999, cosine
    yield "drafts"


def check_selftest_fails(folder: Path) -> Iterator[str]:
    """Each fault makes start-up fail, by the name of the shape."""
    for what, desk in (
        ("attention that is wrong", Desk(folder, wrap=_shifted)),
        ("a graph that does nothing", Desk(folder, device=Idle(HOST))),
    ):
        with pytest.raises(PreparationError, match="decode 3x1"):
            desk.engine()
        yield f"self-test catches {what}"


class Idle(Host):
    """Its graphs do nothing."""

    def capture(self, body, what):
        super().capture(body, what)
        return lambda: None


def _shifted(kernels: StepKernels) -> StepKernels:
    """Attention that is off by a little in every channel."""

    def wrong(layer: LayerKernels) -> LayerKernels:
        def attend(*args):
            return layer.attend(*args) + 0.05

        return replace(layer, attend=attend)

    return replace(kernels, layers={kind: wrong(of) for kind, of in kernels.layers.items()})


def check_parts() -> Iterator[str]:
    shapes = shape_set((1, 2, 4), 4, 64, 2)
    step = Step(
        (
            ScheduledRequest(_request([1] * 9, [1]), 8, 1, True),
            ScheduledRequest(_request([1] * 9, [2]), 6, 3, True),
            ScheduledRequest(_request([1] * 2, [3]), 0, 2, True),
            ScheduledRequest(_request([1] * 20, [4]), 0, 20, False),
        ),
        num_decodes=3,
    )
    found = [(str(p.shape), p.indices) for p in parts(step, shapes)]
    assert found == [
        ("decode 1x1", (0,)),
        ("decode 1x3", (1,)),
        # the third has no three tokens to ask for, so it goes with those that prefill
        ("prefill 32", (2, 3)),
    ], found
    assert {p.shape.phase for p in parts(step, shapes)} == {Phase.DECODE, Phase.PREFILL}
    yield "parts"


def _request(ids: list[int], pages: list[int]) -> Request:
    number = next(_numbers)
    return Request(f"q{number}", tuple(ids), SamplingParams(), number, page_ids=pages)


_numbers = iter(range(10**6))


def _logits(
    runner: QueuedRunner, requests: list[Request], spans: list[tuple[int, int]], decodes: int = 0
) -> torch.Tensor:
    rows = []
    for first in range(0, max(count for _, count in spans), 16):
        shares = tuple(
            ScheduledRequest(r, start + first, min(16, count - first), samples=bool(decodes))
            for r, (start, count) in zip(requests, spans, strict=True)
            if count > first
        )
        rows.append(runner.logits(Step(shares, num_decodes=decodes)).float())
    return torch.cat(rows)


def main() -> None:
    folder = Path(sys.argv[1])
    checks = (check_parts(), check_answers(folder), check_drafts(folder))
    for check in (*checks, check_selftest_fails(folder)):
        for name in check:
            print("ok", name, flush=True)


if __name__ == "__main__":
    main()
