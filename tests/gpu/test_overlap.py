"""A step ahead of a real device: the same answers as in sequence, and no wait in submitting."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minuet.engine.start import Engine
from minuet.engine.types import FinishReason, SamplingParams
from tests.engine.desk import token_ids
from tests.gpu.test_engine import prepared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can see"),
]


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Engine:
    # whoever else is in the batch must not matter: the two runs batch differently
    return prepared(checkpoint("small", layers=4), batch_invariant=True)


def asked(rng: random.Random, vocab: int) -> SamplingParams:
    """Any way to draw, and about one token in twenty ends the answer."""
    more: dict[str, object] = {"temperature": rng.choice((0.0, 0.0, 0.8)), "seed": 7}
    if rng.random() < 0.2:
        more["min_tokens"] = 6
    if rng.random() < 0.1:
        more["repetition_penalty"] = 1.2
    if rng.random() < 0.2:
        more["logprobs"] = 2
    if rng.random() < 0.3:
        more["prompt_logprobs"] = 1
    stops = tuple(range(rng.randrange(20), vocab, 20))
    return SamplingParams(max_tokens=rng.randint(6, 40), stop_token_ids=stops, **more)


def answers(engine: Engine, depth: int) -> list[object]:
    core, vocab = engine.core, engine.plan.facts.vocab
    engine.runner.depth = depth
    core.scheduler.prefix.reset()
    rng, outputs = random.Random(3), []
    for number in range(48):
        prompt = token_ids(rng.randint(1, 200), vocab, seed=number)
        outputs.append(core.add(f"{depth}-{number}", prompt, asked(rng, vocab)))
        for _ in range(rng.choice((0, 1, 2))):
            core.step()
    core.abort(f"{depth}-47")
    while core.has_work:
        core.step()
        core.scheduler.integrity()
    assert core.scheduler.pool.usable == core.scheduler.pool.capacity
    assert not any(output.error for output in outputs)
    ends = {output.finish_reason for output in outputs}
    assert {FinishReason.STOP, FinishReason.LENGTH} <= ends
    return [
        (o.token_ids, o.finish_reason, o.stop_reason, o.logprobs, o.prompt_logprobs)
        for o in outputs[:-1]
    ]


def test_a_step_ahead_answers_as_in_sequence(engine):
    assert engine.runner.depth == 1
    try:
        assert answers(engine, 1) == answers(engine, 0)
    finally:
        engine.runner.depth = 1


def test_submitting_a_step_never_waits_for_the_device(engine):
    core, vocab = engine.core, engine.plan.facts.vocab
    submit = core._submit

    def without_waiting() -> None:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            submit()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    core._submit = without_waiting
    try:
        rng = random.Random(4)
        outputs = [
            core.add(f"w{number}", token_ids(40 + number, vocab, seed=number), asked(rng, vocab))
            for number in range(20)
        ]
        while core.has_work:
            core.step()
    finally:
        del core._submit
    assert not any(output.error for output in outputs)
