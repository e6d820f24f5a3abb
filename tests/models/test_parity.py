"""Logits and selections equal transformers', and do not depend on how the tokens were fed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minuet.attention.backends.cpu import launch
from tests import oracle
from tests.engine.desk import answer, engine, row_logits, token_ids

TOLERANCE = 1e-4  # FP32, largest absolute difference of any logit

# checkpoint, tokens: tiny selects from token 12 on (block 4, top-3), tiny128 from 2,048 on
MODELS = [("tiny", 45), ("tiny128", 2564)]


@pytest.fixture(scope="module", params=MODELS, ids=[name for name, _ in MODELS])
def model(request, checkpoint: Callable[..., Path]):
    name, length = request.param
    folder = checkpoint(name)
    prepared = engine(folder, kv_cache_memory="64MiB", max_num_batched_tokens=4096)
    ids = token_ids(length, prepared.plan.facts.vocab)
    want = oracle.logits(oracle.load(folder), ids)
    assert float(want.std()) > 0.5, "a flat model would hide mistakes"
    return prepared, folder, ids, want


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max())


def test_logits_of_a_whole_prompt_equal_transformers(model):
    prepared, _, ids, want = model
    assert worst(row_logits(prepared, ids, [len(ids)]), want) < TOLERANCE


def test_selected_blocks_equal_transformers(model, monkeypatch):
    prepared, folder, ids, _ = model
    seen: list[torch.Tensor] = []
    original = launch.select

    def spy(*args):
        seen.append(original(*args))
        return seen[-1]

    for attention in prepared.core._executor.model._attention:
        kernels = attention._kernels
        if kernels.select is not None:
            monkeypatch.setattr(
                attention, "_kernels", type(kernels)(kernels.write, spy, kernels.attend)
            )
    row_logits(prepared, ids, [len(ids)])
    theirs = oracle.selections(oracle.load(folder), ids)
    assert len(seen) == len(theirs) > 0
    differing = total = 0
    for ours, want in zip(seen, theirs.values(), strict=True):
        width = want.shape[-1]
        mine = ours.permute(1, 0, 2).long().sort(-1).values[..., -width:]
        differing += int((mine != want.sort(-1).values).any(-1).sum())
        total += want.shape[0] * want.shape[1]
    # random FP32 scores have no exact ties; near-ties may round apart
    assert differing <= total // 10_000, f"{differing} of {total} selections differ"


def test_logits_token_by_token_equal_the_whole_prompt(model):
    prepared, _, ids, want = model
    head = max(0, len(ids) - 45)  # the last tokens one by one, after the rest in one step
    chunks = ([head] if head else []) + [1] * (len(ids) - head)
    assert worst(row_logits(prepared, ids, chunks), want) < TOLERANCE


def test_logits_of_chunked_prefill_equal_the_whole_prompt(model):
    prepared, _, ids, want = model
    block = prepared.plan.config.block_size
    sizes = [13, 4, 1, block - 1, block, block + 1]
    chunks: list[int] = []
    while sum(chunks) < len(ids):
        chunks.append(min(sizes[len(chunks) % len(sizes)], len(ids) - sum(chunks)))
    assert worst(row_logits(prepared, ids, chunks), want) < TOLERANCE


@pytest.mark.parametrize("query_len", [2, 3, 4, 5])
def test_verification_of_drafts_with_rollback_equals_the_whole_prompt(model, query_len):
    """Wrong drafts are computed at every block edge, rejected, and the true tokens fed again."""
    prepared, _, ids, want = model
    block = prepared.plan.config.block_size
    start = (len(ids) - 9) // block * block - query_len // 2  # straddles a block border
    wrong = [(i + 11) % 200 + 3 for i in ids[start : start + query_len]]
    tried = row_logits(prepared, ids[:start] + wrong, [start, query_len])
    assert worst(tried[:start], want[:start]) < TOLERANCE
    chunks = [start, query_len, len(ids) - start - query_len]
    assert worst(row_logits(prepared, ids, chunks), want) < TOLERANCE


def test_generated_tokens_equal_transformers(model):
    prepared, folder, ids, _ = model
    want = oracle.generate(oracle.load(folder), ids, 6)
    assert answer(prepared, [ids], max_tokens=6) == [want]
    assert answer(prepared, [ids], max_tokens=6) == [want], "the prefix cache changed the answer"


def test_bfloat16_stays_near_float32(model, checkpoint):
    _, folder, ids, want = model
    low = engine(folder, dtype="bfloat16", kv_cache_memory="64MiB", max_num_batched_tokens=4096)
    got = row_logits(low, ids, [len(ids)])
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
    # selections of near-tied blocks flip in 16 bits, so rows differ; the body of them may not
    assert float(cosine.median()) > 0.99
