"""A paged decode in Triton over the shuffle form: another compiler's word on the same cache.

Written for clearness, one workgroup per (sequence, KV head), no split. It shares nothing with the
FlyDSL kernels but the layout of the cache.
"""

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minuet.kv.layout import LaneName
from minuet.testing.amdgpu import Geometry, Memory, launch, parse
from minuet.testing.amdgpu.state import TARGETS
from tests.attention.flydsl_sim import array

WARPS = 4


@triton.jit
def decode(
    out_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lengths_ptr,
    scale_log2, max_pages, heads,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, X: tl.constexpr,
    TILE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """softmax(q . K) V of one sequence and KV head."""
    seq, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + seq)
    vector, channel, token = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, TILE)
    q_at = (seq * heads + head) * GROUP * D + vector[:, None] * D + channel[None, :]
    q = tl.load(q_ptr + q_at, mask=vector[:, None] < GROUP, other=0.0)
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for first in range(0, length, TILE):
        page = tl.load(table_ptr + seq * max_pages + first // PAGE).to(tl.int64)
        # tokens of a chunk are neighbours: along the contraction, so nothing needs transposing
        slot = tl.multiple_of(first % PAGE, TILE) + token
        base = (page * heads + head) * PAGE * D
        valid = first + token < length
        k_at = (channel[:, None] // X) * PAGE * X + slot[None, :] * X + channel[:, None] % X
        k = tl.load(k_ptr + base + k_at, mask=valid[None, :], other=0.0).to(tl.bfloat16)
        v_at = (slot[:, None] // X) * D * X + channel[None, :] * X + slot[:, None] % X
        v = tl.load(v_ptr + base + v_at, mask=valid[:, None], other=0.0).to(tl.bfloat16)
        scores = tl.dot(q, k) * scale_log2
        if FP8:
            at = (page * heads + head) * PAGE + slot
            scores *= tl.load(k_scale_ptr + at, mask=valid, other=0.0)[None, :]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if FP8:
            at = (page * heads + head) * PAGE + slot
            weights *= tl.load(v_scale_ptr + at, mask=valid, other=0.0)[None, :]
        acc = acc * shrink[:, None] + tl.dot(weights.to(tl.bfloat16), v)
        top = new_top
    result = acc / total[:, None]
    tl.store(out_ptr + q_at, result.to(tl.bfloat16), mask=vector[:, None] < GROUP)


def build(arch: str, fp8: bool, group: int, head_dim: int = 128, page: int = 128):
    """The compiled kernel."""
    flavour = {"gfx942": "*fp8e4b8"}.get(arch, "*fp8e4nv")
    cache = flavour if fp8 else "*bf16"
    signature = {
        "out_ptr": "*bf16",
        "q_ptr": "*bf16",
        "k_ptr": cache,
        "v_ptr": cache,
        "k_scale_ptr": "*fp32",
        "v_scale_ptr": "*fp32",
        "table_ptr": "*i32",
        "lengths_ptr": "*i32",
        "scale_log2": "fp32",
        "max_pages": "i32",
        "heads": "i32",
    }
    constants = {"GROUP": group, "D": head_dim, "PAGE": page, "X": 16 if fp8 else 8}
    constants |= {"TILE": 64, "FP8": fp8}
    source = ASTSource(decode, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
    target = GPUTarget("hip", arch, TARGETS[arch].wave)
    return triton.compile(source, target=target, options={"num_warps": WARPS})


def run(arch: str, world) -> np.ndarray:
    """Output bits ``[T, H, D]`` of the kernel in the simulator."""
    case, lanes = world.case, world.cache.lanes
    code = build(arch, case.kv_dtype.is_fp8, case.group, case.head_dim, case.page)
    memory = Memory()
    out = memory.place("out", np.full(tuple(world.q.shape), 0x7FC0, np.uint16))
    scales = [
        memory.place(name.value, array(lanes[name]), readonly=True) if name in lanes else None
        for name in (LaneName.K_SCALE, LaneName.V_SCALE)
    ]
    arguments = [
        out,
        memory.place("q", array(world.q), readonly=True),
        memory.place("k", array(lanes[LaneName.K]), readonly=True),
        memory.place("v", array(lanes[LaneName.V]), readonly=True),
        *scales,
        memory.place("table", array(world.batch.page_table), readonly=True),
        memory.place("lengths", np.array(case.lens, np.int32), readonly=True),
        case.head_dim**-0.5 * 1.4426950408889634,
        world.batch.page_table.shape[1],
        case.kv_heads,
    ]
    module = parse(code.asm["llir"])
    (function,) = module.kernels.values()
    scratch = [None] * (len(function.params) - len(arguments))  # of the compiler, unused
    shape = Geometry(
        (len(case.lens), case.kv_heads, 1),
        (WARPS * TARGETS[arch].wave, 1, 1),
        code.metadata.shared,
    )
    launch(module, function.name, [*arguments, *scratch], memory, shape, arch=arch)
    return memory.fetch(out)
