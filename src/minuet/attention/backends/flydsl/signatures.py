"""The kernels of this backend as data: parameters, specialisations, symbols. No compiler here.

A **specialisation** is what is compiled once; everything that changes from step to step, batch size
included, is a run-time parameter. :func:`specialisations` is the closed set of a problem.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minuet.attention.contract import LayerKind, Op, Phase, Problem
from minuet.dtypes import DType

WAVES = 4  # waves of a workgroup, all kernels but those of one wave


@dataclass(frozen=True, slots=True)
class Signature:
    """One kernel.

    Attributes:
        module: of ``kernels``, with a ``build(traits, **options)``.
        params: (name, kind) in order; a kind ending in ``*`` is a pointer, ``cache*`` one to
            elements of the cache lane it reads (bytes for FP8).
        outputs: names of the pointers that the kernel writes through.
        grid: names of the launcher's parameters behind those of the kernel.
        waves: waves of a workgroup.
    """

    module: str
    params: tuple[tuple[str, str], ...]
    outputs: frozenset[str]
    grid: tuple[str, ...]
    waves: int = WAVES


def _signature(module: str, params: str, grid: tuple[str, ...], waves: int = WAVES) -> Signature:
    """From ``name:kind`` words; an exclamation mark behind the kind marks an output."""
    pairs = [word.split(":") for word in params.split()]
    return Signature(
        module,
        tuple((name, kind.removesuffix("!")) for name, kind in pairs),
        frozenset(name for name, kind in pairs if kind.endswith("!")),
        grid,
        waves,
    )


SIGNATURES: Mapping[str, Signature] = MappingProxyType(
    {
        "attend": _signature(
            "attend",
            "out:bf16*! partial_out:f32*! partial_lse:f32*! q:bf16* k:cache* v:cache* "
            "k_scale:f32* v_scale:f32* page_table:i32* positions:i64* work:i32* lists:i32* "
            "scale_log2:f32 kv_heads:i32 group:i32 query_len:i32 max_pages:i32 slots:i32 "
            "parts:i32 top:i32",
            ("grid_x", "grid_z"),
        ),
        "merge": _signature(
            "merge",
            "out:bf16*! partial_out:f32* partial_lse:f32* rows:i32* kv_heads:i32 group:i32 "
            "query_len:i32 slots:i32 parts:i32",
            ("grid_x",),
        ),
        "scores": _signature(
            "scores",
            "scores:f32*! index_q:bf16* index_k:cache* page_table:i32* positions:i64* "
            "sequences:i32* heads:i32 max_pages:i32 max_blocks:i32",
            ("grid_x", "grid_y"),
        ),
        "choose": _signature(
            "choose",
            "blocks:i32*! scores:f32* positions:i64* heads:i32 max_blocks:i32 top:i32 "
            "init_blocks:i32 local_blocks:i32",
            ("grid_x",),
            1,
        ),
        "write": _signature(
            "write",
            "q_out:bf16*! index_q_out:bf16*! k:cache*! v:cache*! k_scale:f32*! v_scale:f32*! "
            "index_k:index*! packed:bf16* slots:i64* cosine:f32* sine:f32* q_norm:f32* "
            "k_norm:f32* index_q_norm:f32* index_k_norm:f32* eps:f32 q_heads:i32 kv_heads:i32 "
            "half:i32",
            ("grid_x", "grid_y"),
            1,
        ),
        "plan": _signature(
            "plan",
            "work:i32*! rows:i32*! lengths_out:i32*! lengths:i32* num_seqs:i32 max_seqs:i32 "
            "capacity:i32 budget:i32 max_parts:i32 part_tiles:i32 tile_tokens:i32",
            (),
        ),
    }
)

Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One specialisation of one kernel for one arch.

    Attributes:
        kernel: key of :data:`SIGNATURES`.
        arch: ``gfx942``, ``gfx950`` or ``gfx1250``.
        options: arguments of ``build``, sorted by name.
    """

    kernel: str
    arch: str
    options: Options

    @classmethod
    def of(cls, kernel: str, arch: str, **options: object) -> "Key":
        """A key with its options in order."""
        return cls(kernel, arch, tuple(sorted(options.items())))

    @property
    def name(self) -> str:
        """For files and people: ``attend-fp8_true-head_dim_128-...-gfx950``."""
        parts = [f"{name}_{value}".lower() for name, value in self.options]
        return "-".join([self.kernel, *parts, self.arch])


def specialisations(problem: Problem, arch: str) -> tuple[Key, ...]:
    """Every kernel that a problem's launcher may start; nothing else is compiled after start-up."""
    fp8 = problem.kv_dtype.is_fp8
    if problem.op is Op.WRITE:
        return (
            Key.of(
                "write",
                arch,
                fp8=fp8,
                head_dim=problem.head_dim,
                page=problem.page_size,
                index_dim=problem.index_dim,
                index_fp8=problem.index_dtype.is_fp8 and problem.index_dim > 0,
            ),
        )
    if problem.op is Op.SELECT:
        index_fp8 = problem.index_dtype in (DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ)
        return (
            Key.of("scores", arch, fp8=index_fp8, index_dim=problem.index_dim),
            Key.of("choose", arch),
        )
    shape = {"fp8": fp8, "head_dim": problem.head_dim, "page": problem.page_size}
    if problem.layer_kind is LayerKind.SPARSE:
        return (
            Key.of("attend", arch, mode="sparse", **shape),
            Key.of("merge", arch, head_dim=problem.head_dim, planned=False),
        )
    if problem.phase is Phase.PREFILL:
        return (Key.of("attend", arch, mode="rows", **shape),)
    return (
        Key.of("attend", arch, mode="plan", **shape),
        Key.of("merge", arch, head_dim=problem.head_dim, planned=True),
        Key.of("plan", arch),
    )
