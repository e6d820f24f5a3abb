"""The checks through Triton's interpreter; ``test_interpreter.py`` starts this as a process.

TRITON_INTERPRET=1 python -m tests.ops.interpreter [CHECK ...]
"""

import sys
import time
import traceback

import torch

from minuet.ops.table import ops_for
from minuet.ops.triton import launch
from tests.ops.conformance import Bench, checks


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    # FP16: the interpreter rounds FP32 to BF16 towards zero
    bench = Bench(ops_for("triton"), device, torch.float16, 2e-3)
    invariant = Bench(ops_for("triton", batch_invariant=True), device, torch.float16, 2e-3)
    failed = 0
    for name, check in checks(bench, invariant, launch).items():
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
