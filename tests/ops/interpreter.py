"""The checks through Triton's interpreter; ``test_interpreter.py`` starts this as a process.

TRITON_INTERPRET=1 python -m tests.ops.interpreter [CHECK ...]
"""

import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

import minuet.engine.start as engine_start
from minuet.models.m3.export import make_checkpoint
from minuet.ops.table import ops_for
from minuet.ops.triton import experts as moe
from tests.engine.desk import engine, row_logits, token_ids
from tests.ops.conformance import Bench, checks


def check_model() -> None:
    """A whole model with these operations, against the same model in plain torch."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), preset="tiny", layers=3)

        def logits() -> torch.Tensor:
            prepared = engine(Path(folder), dtype="float16", arch="cpu")
            ids = token_ids(40, prepared.plan.facts.vocab)
            return torch.cat([row_logits(prepared, ids, [33, 1, 6])])

        want = logits()
        plain, engine_start.ops_for = engine_start.ops_for, lambda *_, **__: ops_for("triton")
        try:
            got = logits()
        finally:
            engine_start.ops_for = plain
    assert not torch.equal(got, want), "the operations were not used"
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
    # a near-tied expert or block may be chosen differently in a few rows
    assert float(cosine.median()) > 0.9999
    assert float((cosine > 0.99).float().mean()) > 0.85


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    # FP16: the interpreter rounds FP32 to BF16 towards zero
    bench = Bench(ops_for("triton"), device, torch.float16, 2e-3)
    invariant = Bench(ops_for("triton", batch_invariant=True), device, torch.float16, 2e-3)
    failed = 0
    for name, check in (checks(bench, invariant, moe) | {"model": check_model}).items():
        if names and name not in names:
            continue
        start = time.perf_counter()
        try:
            check()
        except Exception:  # noqa: BLE001 - report it and run the others
            failed += 1
            print("FAILED", name, traceback.format_exc()[-3000:], flush=True)
        else:
            print(f"ok {name} ({time.perf_counter() - start:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
