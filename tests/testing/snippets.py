"""Small kernels in IR around one instruction."""

import numpy as np
import torch

from minuet.testing.amdgpu import Geometry, Memory, launch, parse

NUMPY = {
    "i1": np.uint8,
    "i8": np.uint8,
    "i16": np.uint16,
    "i32": np.uint32,
    "i64": np.uint64,
    "half": np.float16,
    "bfloat": np.uint16,
    "float": np.float32,
    "double": np.float64,
}


TESTED: set[str] = set()


def covers(*names):
    """Note which models a test is about."""
    TESTED.update(names)
    return lambda test: test


def element(kind: str) -> tuple[int, str]:
    """Count and scalar of ``float`` or ``<4 x float>``."""
    if kind.startswith("<"):
        count, _, scalar = kind[1:-1].split()
        return int(count), scalar
    return 1, kind


def run(body: str, inputs: dict, result: str, *, arch="gfx950", lanes=None, lds="", order=None):
    """Run ``body`` for every lane: names of ``inputs`` are values, ``%r`` is stored.

    Args:
        body: instructions; ``%tid`` is there too.
        inputs: name to (type, array [lanes, ...]).
        result: type of ``%r``.
        arch: target.
        lanes: work-items; one wave by default.
        lds: module-level LDS variables.
        order: of waves.
    """
    lanes = lanes or {"gfx1250": 32}.get(arch, 64)
    params = [f"ptr addrspace(1) %p{n}" for n in range(len(inputs))] + ["ptr addrspace(1) %out"]
    lines = [lds, f"define amdgpu_kernel void @k({', '.join(params)}) {{"]
    lines.append("  %tid = call i32 @llvm.amdgcn.workitem.id.x()")
    memory, arguments = Memory(), []
    for number, (name, (kind, data)) in enumerate(inputs.items()):
        lines.append(f"  %a{number} = getelementptr {kind}, ptr addrspace(1) %p{number}, i32 %tid")
        lines.append(f"  %{name} = load {kind}, ptr addrspace(1) %a{number}, align 1")
        arguments.append(memory.place(name, np.ascontiguousarray(data)))
    for line in body.strip().splitlines():
        label = line.strip().endswith(":")
        lines.append(line.strip() if label else f"  {line.strip()}")
    lines += [
        f"  %o = getelementptr {result}, ptr addrspace(1) %out, i32 %tid",
        f"  store {result} %r, ptr addrspace(1) %o, align 1",
        "  ret void",
        "}",
    ]
    count, scalar = element(result)
    shape = (lanes, count) if result.startswith("<") else (lanes,)
    out = memory.place("out", np.zeros(shape, NUMPY[scalar]))
    code = parse("\n".join(lines))
    shape = Geometry((1, 1, 1), (lanes, 1, 1))
    launch(code, "k", (*arguments, out), memory, shape, arch=arch, order=order)
    return memory.fetch(out)


def one(call, inputs, result, **how):
    """Run a single call; arguments as :func:`run`."""
    return run(f"%r = call {call}", inputs, result, **how)


def same_bits(got, want):
    """BF16 bits equal a BF16 tensor, NaN included."""
    numbers = torch.from_numpy(got.view(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(numbers, want, rtol=0, atol=0, equal_nan=True)
