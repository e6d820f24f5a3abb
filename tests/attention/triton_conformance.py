"""The suite through Triton's interpreter; ``test_triton_interpreter.py`` starts this as a process.

TRITON_INTERPRET=1 python -m tests.attention.triton_conformance [CASE ...]
"""

import sys
import time

import torch

from minuet.attention.backends.triton import launch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from tests.attention.conformance import (
    REDUCED,
    Backend,
    cases,
    check,
    check_ties,
    check_write,
    check_write_of_sums,
)
from tests.attention.triton_choice import LONG, MIDDLE, SHORT, check_choice
from tests.attention.triton_forms import cases as form_cases
from tests.attention.triton_forms import check_forms
from tests.attention.triton_planned import check_planned


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    backend = Backend(
        launch,
        torch.device("cpu"),
        lambda batch, case: launch.plan(
            batch, case.page, num_kv_heads=case.kv_heads, group=case.group
        ),
    )
    fp8 = DType.FP8_E4M3FN
    suite = cases(fp8)
    chosen = names or [name.format(fp8=fp8) for name in REDUCED]
    for name in chosen:
        began = time.monotonic()
        check(suite[name], backend)
        print(f"ok {name} {time.monotonic() - began:.1f} s", flush=True)
    if not names:
        check_ties(backend)
        print("ok ties", flush=True)
        check_choice(backend.device, SHORT, Selection(16, 2, 1))
        check_choice(backend.device, MIDDLE[-3:], Selection(5, 0, 3))
        check_choice(backend.device, LONG[-2:], Selection(16))
        print("ok choice", flush=True)
        for score_bytes in (1 << 20, 1 << 10):  # all at once; a few query tokens at a time
            check_planned(backend.device, score_bytes, reduced=True)
        print("ok planned", flush=True)
        check_forms(form_cases(fp8)[f"few-{fp8}"], backend)
        print("ok forms", flush=True)
        # FP16: the interpreter rounds FP32 to BF16 towards zero
        for kv in (DType.FP16, fp8):
            check_write(backend, kv, kv, 64, torch.float16, carries=False)
            check_write(backend, kv, DType.FP16, 0, torch.float16, carries=False)
            check_write_of_sums(backend, kv, 64, torch.float16)
        print("ok write", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
