"""The audit measures what it says: mass, ties, depths, and a selection that is off."""

from dataclasses import replace

import pytest
import torch

from minuet.attention import reference
from minuet.attention.contract import LayerKind
from minuet.attention.reference import Selection
from minuet.config import read_options
from minuet.engine.llm import LLM
from minuet.engine.start import start
from minuet.engine.types import SamplingParams
from minuet.errors import ConfigError
from minuet.evals import show
from minuet.evals.plot import selection_svg
from minuet.evals.selection import DEPTHS, Watcher, audit, block_mass, decided_by_tie
from tests.engine.desk import token_ids

BLOCK, TOP = 4, 3  # preset tiny


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("tiny")


def options(folder, **more):
    fixed = {"arch": "cpu", "enable_prefix_caching": False, "kv_cache_pages": 64}
    return read_options({"model": str(folder), **fixed, **more})


def audited(folder, lengths, **more):
    texts = [token_ids(n, 512, seed=n) for n in lengths]
    return audit(options(folder, **more), lambda engine: texts, lambda line: None)


def test_block_mass_is_the_softmax_over_all_visible_tokens_by_block():
    torch.manual_seed(0)
    q, k = torch.randn(6, 8), torch.randn(11, 2, 8)
    mass = block_mass(q, k, BLOCK, 0.3)
    assert mass.shape == (2, 3)
    for head in range(2):
        want = torch.zeros(3)
        for query in range(3 * head, 3 * head + 3):
            weights = (k[:, head] @ q[query] * 0.3).softmax(0)
            for token in range(11):
                want[token // BLOCK] += weights[token] / 3
        torch.testing.assert_close(mass[head], want)
    torch.testing.assert_close(mass.sum(1), torch.ones(2))


@pytest.mark.parametrize(
    ("scores", "chosen", "tie"),
    [
        ([3.0, 2.0, 1.0, 9.0], [0, 1, 3], False),
        ([3.0, 2.0, 2.0, 9.0], [0, 1, 3], True),
        ([2.0, 2.0, 2.0, 9.0], [0, 1, 3], True),
        ([3.0, 3.0, 1.0, 9.0], [0, 1, 3], False),  # a tie within the chosen decides nothing
        ([3.0, 2.0, 1.0, 2.0], [0, 1, 3], False),  # the last block is chosen whatever its score
        ([3.0, 2.0], [0, 1], False),
    ],
)
def test_a_tie_counts_where_it_decided(scores, chosen, tie):
    assert decided_by_tie(torch.tensor(scores), chosen, Selection(TOP)) is tie


def test_the_audit_is_exact_for_a_row_computed_by_hand(folder):
    """One row, one layer: from the cache and the queries, by the reference's functions."""
    seen = {}

    def spy(kernels):
        sparse = kernels.layers[LayerKind.SPARSE]

        def select(index_q, cache, plan, selection):
            blocks = sparse.select(index_q, cache, plan, selection)
            seen.setdefault("blocks", blocks.clone())
            return blocks

        def attend(q, cache, plan, blocks, scale):
            if "q" not in seen:
                seen.update(q=q.clone(), cache=cache, scale=scale)
            return sparse.attend(q, cache, plan, blocks, scale)

        return replace(
            kernels,
            layers={
                **kernels.layers,
                LayerKind.SPARSE: replace(sparse, select=select, attend=attend),
            },
        )

    watcher = Watcher()
    engine = start(options(folder), lambda line: None, watch=lambda k: watcher.wrap(spy(k)))
    length = 30
    watcher.look_at(length)
    watcher._rows = frozenset([length - 1])
    LLM.over(engine).generate([token_ids(length, 512)], SamplingParams(max_tokens=1))
    pages = torch.arange(1, 1 + -(-length // BLOCK))
    k, _, _ = reference.read(seen["cache"], pages, length)
    mass = block_mass(seen["q"][-1], k, BLOCK, seen["scale"])
    for head in range(mass.shape[0]):
        found = watcher.heads[1, head]
        chosen = [b for b in seen["blocks"][-1, head].tolist() if b >= 0]
        assert len(chosen) == TOP
        assert found.recall == pytest.approx([float(mass[head, chosen].sum())], rel=1e-5)
        assert found.best == pytest.approx([float(mass[head].sort().values[-TOP:].sum())], rel=1e-5)
        assert found.window == pytest.approx([float(mass[head, -TOP:].sum())], rel=1e-5)


def test_every_sparse_head_is_audited_and_the_bounds_hold(folder):
    found = audited(folder, [45, 60])
    shown = found.as_json()
    assert [(h["layer"], h["kv_head"]) for h in shown["heads"]] == [
        (layer, head) for layer in (1, 2, 3) for head in (0, 1)
    ]
    for head in shown["heads"]:
        assert head["rows"] > 50
        assert 0 < head["recall_min"] <= head["recall_mean"] <= head["best_mean"] <= 1 + 1e-6
        assert head["window_mean"] <= head["best_mean"]
        assert head["differing"] == 0, "the kernel chose otherwise than the reference"
        assert len(head["chosen_by_depth"]) == DEPTHS
        pairs = zip(head["chosen_by_depth"], head["reachable_by_depth"], strict=True)
        assert all(0 <= taken <= reachable for taken, reachable in pairs)
        # a row chooses TOP blocks, its own among them
        assert sum(head["chosen_by_depth"]) == head["rows"] * (TOP - 1)
    assert all(0 < share <= 1 for share in shown["coverage"].values())


def test_a_kernel_that_chooses_other_blocks_is_noticed(folder):
    """Newest blocks instead of the best: recall is that of the window, and rows differ."""

    def wrong(kernels):
        sparse = kernels.layers[LayerKind.SPARSE]

        def select(index_q, cache, plan, selection):
            blocks = sparse.select(index_q, cache, plan, selection)
            own = blocks.max(-1, keepdim=True).values
            newest = own - torch.arange(TOP - 1, -1, -1, dtype=blocks.dtype)
            return torch.where(own >= TOP - 1, newest, blocks).to(blocks.dtype)

        return replace(
            kernels, layers={**kernels.layers, LayerKind.SPARSE: replace(sparse, select=select)}
        )

    watcher = Watcher()
    engine = start(options(folder), lambda line: None, watch=lambda k: watcher.wrap(wrong(k)))
    watcher.look_at(50)
    LLM.over(engine).generate([token_ids(50, 512)], SamplingParams(max_tokens=1))
    for head in watcher.heads.values():
        assert head.recall == pytest.approx(head.window)
        assert head.differing > 0.5 * len(head.recall)
        assert sum(head.depths[: DEPTHS // 2]) < sum(head.depths[DEPTHS // 2 :])


def test_chunks_of_a_text_give_the_same_audit(folder):
    whole = audited(folder, [60]).as_json()
    parts = audited(folder, [60], max_num_batched_tokens=7, max_num_seqs=4).as_json()
    for one, two in zip(whole["heads"], parts["heads"], strict=True):
        assert one["rows"] == two["rows"]
        assert one["recall_mean"] == pytest.approx(two["recall_mean"], abs=2e-5)
        assert one["chosen_by_depth"] == two["chosen_by_depth"]


def test_texts_that_leave_nothing_out_are_refused(folder):
    with pytest.raises(ConfigError, match="more than 12"):
        audited(folder, [TOP * BLOCK])


def test_watching_changes_no_answer(folder):
    prompt = token_ids(40, 512)
    plain = LLM.over(start(options(folder), lambda line: None))
    watcher = Watcher()
    watched = LLM.over(start(options(folder), lambda line: None, watch=watcher.wrap))
    watcher.look_at(40)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    (one,), (two,) = plain.generate([prompt], params), watched.generate([prompt], params)
    assert one.token_ids == two.token_ids
    assert one.logprobs == two.logprobs


def test_the_picture_and_the_table_have_every_head(folder):
    found = audited(folder, [45]).as_json()
    picture = selection_svg(found)
    assert picture.count('class="chosen"') == len(found["heads"])
    assert picture.count('class="cell"') == len(found["heads"]) * DEPTHS
    lines = list(show.selection(found))
    assert len(lines) == 3 + len(found["heads"])
    first = found["heads"][0]
    assert f"{first['recall_mean']:.4f}" in lines[2]
