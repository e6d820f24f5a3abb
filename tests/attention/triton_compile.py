"""Compile a launch to machine code for a GPU that is not there, and read what came out."""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minuet.attention.backends.triton import attending, config, selecting, step, writing
from minuet.attention.batch import AttentionBatch
from minuet.attention.reference import Selection
from minuet.dtypes import DType
from minuet.kv.cache import LayerCache
from minuet.kv.layout import KVLayout
from minuet.kv.write import HeadNorms
from minuet.ops.sums import Sums
from minuet.platform.arch import get
from minuet.platform.torch import to_torch
from minuet.platform.triton import Launch

TARGETS = {
    "sm90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1250": GPUTarget("hip", "gfx1250", 32),
}
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}


@dataclass(frozen=True)
class Compiled:
    """A kernel for one arch.

    Attributes:
        arch: which.
        kernel: what the compiler returned.
    """

    arch: str
    kernel: object

    @property
    def shared_bytes(self) -> int:
        return self.kernel.metadata.shared

    @cached_property
    def assembly(self) -> str:
        """SASS or AMD assembly."""
        if "amdgcn" in self.kernel.asm:
            return self.kernel.asm["amdgcn"]
        return _nvidia_tool("nvdisasm", "-c", self.kernel.asm["cubin"])

    @cached_property
    def waits_before_it_writes(self) -> bool:
        """sm90: whether no store or atomic to device memory comes before the wait for a kernel.

        With early starts, memory of a tensor that was freed may still be read until then.
        """
        before, waits, _ = self.assembly.partition("ACQBULK")
        return bool(waits) and not re.search(r"\b(STG|RED|ATOMG?)\b", before)

    @cached_property
    def resources(self) -> dict[str, int]:
        """registers, spill_bytes (stack), shared_bytes, and counts of telling instructions."""
        text = self.assembly
        found = {"shared_bytes": self.shared_bytes}
        if "cubin" in self.kernel.asm:
            usage = _nvidia_tool("cuobjdump", "--dump-resource-usage", self.kernel.asm["cubin"])
            found["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
            found["stack_bytes"] = int(re.search(r"STACK:(\d+)", usage)[1])
            opcodes = re.findall(
                r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.M
            )
            count = lambda *heads: sum(op.startswith(heads) for op in opcodes)  # noqa: E731
            found |= {
                "matrix": count("HMMA", "HGMMA", "QGMMA"),
                "local": count("LDL", "STL"),
                "shared_byte_loads": count("LDS.U8", "LDS.S8"),
                "async_copies": count("LDGSTS"),
                "barriers": count("BAR"),
            }
            return found
        field = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # noqa: E731
        found["registers"] = field("vgpr_count")
        found["stack_bytes"] = field("private_segment_fixed_size")
        # without a stack these live in other registers (AGPRs, lanes of a VGPR)
        found["vgpr_spills"] = field("vgpr_spill_count")
        found["sgpr_spills"] = field("sgpr_spill_count")
        found["matrix"] = len(re.findall(r"^\s+v_(?:mfma|wmma|smfmac)\w+", text, re.M))
        found["local"] = len(re.findall(r"^\s+scratch_(?:load|store)\w+", text, re.M))
        found["shared_byte_loads"] = len(re.findall(r"^\s+ds_(?:read|load)_u8\w*", text, re.M))
        return found


def compile_launch(made: Launch, arch: str) -> Compiled:
    """Compile with the specialisation that the launch's own arguments would get."""
    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(made.kernel.params):
        value = made.args[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constexprs[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            assert -(2**31) <= value < 2**31, parameter.name
            signature[parameter.name] = "i32"
            if parameter.do_not_specialize:
                continue
            if value == 1:
                signature[parameter.name] = "constexpr"
                constexprs[(index,)] = 1
            elif value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(made.kernel, signature, constexprs, attributes)
    options = {k: v for k, v in made.options.items() if k != "launch_pdl" or arch.startswith("sm")}
    return Compiled(arch, triton.compile(source, target=TARGETS[arch], options=options))


def _nvidia_tool(name: str, flag: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    cache = Path("/tmp") / f"minuet-{abs(hash(cubin)):x}.cubin"
    cache.write_bytes(cubin)
    try:
        done = subprocess.run([tool, flag, cache], capture_output=True, text=True, check=True)
    finally:
        cache.unlink()
    return done.stdout


# --- representative launches ---------------------------------------------------------------------

_PREFILL_TOKENS = 256  # fills every tile


@dataclass(frozen=True)
class Shape:
    """What a representative launch is made for; M3 on one of four ranks unless said."""

    kv_dtype: DType
    index_dtype: DType = DType.BF16
    heads: int = 16
    kv_heads: int = 1
    dim: int = 128
    page: int = 128
    query_len: int = 1
    seqs: int = 16
    top: int = 16
    length: int = 8192


def fp8_of(arch: str) -> DType:
    return get(arch).fp8 or DType.FP8_E4M3FN


def launches(shape: Shape, arch: str) -> dict[str, Launch]:
    """Every launch of a layer, on tensors without memory."""
    target = config.TARGETS[arch]
    made: dict[str, Launch] = {}
    cache = _cache(shape)
    tokens = shape.seqs * shape.query_len
    group = shape.heads // shape.kv_heads
    selection = Selection(shape.top, 0, 1)
    sizes = step.StepShape(
        page_size=shape.page, num_kv_heads=shape.kv_heads, group=group, max_seqs=shape.seqs,
        max_tokens=tokens, max_length=shape.length, query_len=shape.query_len,
        compute_units=get(arch).compute_units,
    )  # fmt: skip
    q, index_q = _empty(tokens, shape.heads, shape.dim), _empty(tokens, shape.kv_heads, 128)
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim + (shape.kv_heads + 1) * 128
    sums = Sums(_empty(6, tokens, width, dtype=torch.float32), torch.bfloat16)
    for name, packed in (("write", _empty(tokens, width)), ("write_sums", sums)):
        made[name] = writing.write_launch(
            cache, packed, _empty(tokens, dtype=torch.int64),
            _empty(tokens, 32, dtype=torch.float32), _empty(tokens, 32, dtype=torch.float32),
            HeadNorms(
                *(_empty(n, dtype=torch.float32) for n in (shape.dim,) * 2 + (128,) * 2), 1e-6
            ),
            (q, index_q), target,
        )  # fmt: skip
    plan = _plan(sizes, target, shape.query_len)
    dense, merge = attending.attend_launches(q, q, cache, plan, None, 0.1)
    made |= {"attend_dense": dense, "merge_parts": merge}
    orders = _empty(shape.kv_heads, tokens, -(-shape.length // shape.page), dtype=torch.int32)
    scores = selecting.Scores(orders, selection)
    made["score_blocks"] = selecting.score_launch(index_q, cache, plan, scores)
    made["attend_blocks"] = next(attending.attend_launches(q, q, cache, plan, scores, 0.1))
    tokens = _PREFILL_TOKENS
    ragged = _plan(replace(sizes, query_len=0, max_seqs=1, max_tokens=tokens), target, tokens)
    q, index_q = _empty(tokens, shape.heads, shape.dim), _empty(tokens, shape.kv_heads, 128)
    made["attend_prefill"] = next(attending.attend_launches(q, q, cache, ragged, None, 0.1))
    deferred = selecting.Deferred(index_q, cache, selection)
    names = "score_tiles", "list_blocks", "unite_lists", "attend_rows", "attend_tiles"
    chunk = attending.attend_launches(q, q, cache, ragged, deferred, 0.1)
    made |= dict(zip(names, chunk, strict=True))
    return made


def _plan(sizes: step.StepShape, target: config.Target, query_len: int) -> step.Plan:
    planner = step.Planner(sizes, torch.device("cpu"), target)
    each = query_len or 1
    lens = (each,) * (sizes.max_tokens // each)
    lens = lens[: sizes.max_seqs]
    batch = AttentionBatch(
        lens, (4096,) * len(lens), _empty(sum(lens), dtype=torch.int64),
        _empty(sum(lens), dtype=torch.int64), _empty(len(lens), 64, dtype=torch.int32),
    )  # fmt: skip
    return planner.plan(batch, sizes.page_size)


def _cache(shape: Shape) -> LayerCache:
    layout = KVLayout(shape.page, shape.kv_heads, shape.dim, shape.kv_dtype, 128, shape.index_dtype)
    return LayerCache(
        layout,
        {
            name: torch.empty((64, *lane.shape), dtype=to_torch(lane.dtype), device="meta")
            for name, lane in layout.lanes.items()
        },
    )


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def table(shapes: Iterable[tuple[str, Shape]], archs: Iterable[str]) -> dict[str, dict[str, int]]:
    """Resources of every launch of every shape, by ``arch/shape/kernel``."""
    return {
        f"{arch}/{label}/{name}": compile_launch(made, arch).resources
        for arch in archs
        for label, shape in shapes
        for name, made in launches(shape, arch).items()
    }
