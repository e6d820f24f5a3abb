"""Run FlyDSL kernels of a case in the simulator: what a launcher does, with numpy for a device."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch

from minuet.attention.backends.flydsl import compile as fly_compile
from minuet.attention.backends.flydsl.compile import Compiled
from minuet.attention.backends.flydsl.signatures import SIGNATURES, Key
from minuet.attention.plan import DecodePlan, PlanShape
from minuet.kv.layout import LaneName
from minuet.testing.amdgpu import Geometry, Memory, Module, launch, parse
from minuet.testing.amdgpu.state import TARGETS
from tests.attention.conformance import World

ARCHS = ("gfx942", "gfx950", "gfx1250")
LOG2E = 1.4426950408889634

_done: dict[Key, Compiled] = {}
cache_dir = Path(".pytest_cache") / "flydsl"  # kept between runs; keyed by source and versions


def compiled(key: Key, alongside: tuple[Key, ...] = ()) -> Compiled:
    """A specialisation; others of the arch that will be asked for share the compiler's start."""
    if key not in _done:
        _done.update(fly_compile.compile_all({key, *alongside}, cache_dir.absolute()))
    return _done[key]


@cache
def module(key: Key, edit=None) -> Module:
    """Parsed IR, changed by ``edit`` (a function of the text) for a mutation."""
    text = _done[key].ir
    if edit is not None:
        changed = edit(text)
        assert changed != text, "the mutation changes nothing"
        text = changed
    return parse(text)


def array(tensor: torch.Tensor) -> np.ndarray:
    """Bytes of a tensor as numpy."""
    if tensor.dtype in (torch.bfloat16,):
        return tensor.contiguous().view(torch.uint16).numpy()
    if tensor.dtype.itemsize == 1:
        return tensor.contiguous().view(torch.uint8).numpy()
    return tensor.contiguous().numpy()


@dataclass
class Device:
    """Memory with a case's tensors in it.

    Attributes:
        arch: which.
        memory: the simulator's.
        order: None or the seed of a random order of waves.
        edits: kernel name to a change of its IR.
    """

    arch: str
    memory: Memory = field(default_factory=Memory)
    order: int | None = None
    edits: dict = field(default_factory=dict)

    def place(self, name, data, **how):
        """A tensor or array; returns its pointer."""
        return self.memory.place(name, array(data) if torch.is_tensor(data) else data, **how)

    def run(self, key: Key, arguments: dict, grid) -> None:
        """One kernel by named arguments."""
        code = compiled(key)
        signature = SIGNATURES[key.kernel]
        values = [arguments[name] for name, _ in signature.params]
        launch(
            module(key, self.edits.get(key.kernel)),
            code.report.kernel,
            values,
            self.memory,
            Geometry(grid, (signature.waves * TARGETS[self.arch].wave, 1, 1)),
            arch=self.arch,
            order=self.order,
        )


def place_cache(device: Device, world: World) -> dict:
    """K, V, scales, page table, positions and queries, none of which a kernel may write."""
    lanes, case = world.cache.lanes, world.case
    how = {"readonly": True}
    placed = {
        "q": device.place("q", world.q, **how),
        "k": device.place("k", lanes[LaneName.K], **how),
        "v": device.place("v", lanes[LaneName.V], **how),
        "k_scale": None,
        "v_scale": None,
        "page_table": device.place("page_table", world.batch.page_table, **how),
        "positions": device.place("positions", world.batch.positions, **how),
        "scale_log2": case.head_dim**-0.5 * LOG2E,
        "kv_heads": case.kv_heads,
        "group": case.group,
        "max_pages": world.batch.page_table.shape[1],
    }
    if case.layout.has_scales:
        placed["k_scale"] = device.place("k_scale", lanes[LaneName.K_SCALE], **how)
        placed["v_scale"] = device.place("v_scale", lanes[LaneName.V_SCALE], **how)
    return placed


def output(device: Device, world: World) -> torch.Tensor:
    """An output full of NaN, and its pointer."""
    poison = np.full(tuple(world.q.shape), 0x7FC0, np.uint16)
    return device.place("out", poison)


def fetch(device: Device, pointer, shape) -> torch.Tensor:
    """A bf16 tensor back."""
    raw = device.memory.fetch(pointer)
    return torch.from_numpy(raw.view(np.int16).copy()).view(torch.bfloat16).view(shape)


def attend_options(world: World) -> dict:
    """Of the attend kernel for a case."""
    case = world.case
    return {"fp8": case.kv_dtype.is_fp8, "head_dim": case.head_dim, "page": case.page}


def partials(device: Device, case, slots: int, vectors: int) -> dict:
    """Workspace that holds nothing: reading a slot that no part wrote is an error."""
    shape = (case.kv_heads, max(slots, 1), vectors)
    return {
        "partial_out": device.place(
            "partial_out", np.zeros((*shape, case.head_dim), np.float32), unwritten=True
        ),
        "partial_lse": device.place("partial_lse", np.zeros(shape, np.float32), unwritten=True),
        "slots": slots,
    }


def attend_by_plan(device: Device, world: World, shape: PlanShape) -> torch.Tensor:
    """Dense decode: attend by plan records, then merge."""
    case = world.case
    (query_len,) = set(case.query_lens)
    plan = DecodePlan.over(shape, np.zeros(shape.size, np.int32)).refresh(list(case.lens))
    vectors = case.group * query_len
    out = output(device, world)
    arguments = {
        **place_cache(device, world),
        **partials(device, case, shape.slots, vectors),
        "out": out,
        "work": device.place("work", plan.work, readonly=True),
        "lists": device.place("lengths", plan.lengths, readonly=True),
        "rows": device.place("rows", plan.rows, readonly=True),
        "query_len": query_len,
        "parts": 1,
        "top": 0,
    }
    attend = Key.of("attend", device.arch, mode="plan", **attend_options(world))
    merge = Key.of("merge", device.arch, head_dim=case.head_dim, planned=True)
    compiled(attend, (merge,))
    device.run(attend, arguments, (shape.capacity, case.kv_heads, -(-vectors // 16)))
    device.run(merge, arguments, (len(case.lens), case.kv_heads, 1))
    return fetch(device, out, world.q.shape)


def sequences(world: World) -> np.ndarray:
    """Sequence of each query token."""
    lens = world.batch.query_lens
    return np.repeat(np.arange(len(lens), dtype=np.int32), lens)


def attend_by_rows(
    device: Device, world: World, blocks: torch.Tensor | None, parts: int
) -> torch.Tensor:
    """Every query token by itself: over its past, or over its list of blocks; merge if split."""
    case, tokens = world.case, world.batch.num_tokens
    out = output(device, world)
    slots = tokens * parts if parts > 1 else 0
    arguments = {
        **place_cache(device, world),
        **partials(device, case, slots, case.group),
        "out": out,
        "work": device.place("sequences", sequences(world), readonly=True),
        "lists": None if blocks is None else device.place("blocks", blocks, readonly=True),
        "rows": None,
        "query_len": 1,
        "parts": parts,
        "top": 0 if blocks is None else blocks.shape[2],
    }
    mode = "rows" if blocks is None else "sparse"
    attend = Key.of("attend", device.arch, mode=mode, **attend_options(world))
    merge = Key.of("merge", device.arch, head_dim=case.head_dim, planned=False)
    compiled(attend, (merge,))
    device.run(attend, arguments, (tokens * parts, case.kv_heads, 1))
    if parts > 1:
        device.run(merge, arguments, (tokens, case.kv_heads, 1))
    return fetch(device, out, world.q.shape)


def select(device: Device, world: World) -> torch.Tensor:
    """Scores of every visible block, then the best of them."""
    case, tokens, heads = world.case, world.batch.num_tokens, world.case.kv_heads
    chosen = case.selection
    max_blocks = world.batch.page_table.shape[1]
    blocks = device.place("blocks", np.full((tokens, heads, chosen.top_blocks), -7, np.int32))
    scores = np.zeros((tokens, heads, max_blocks), np.float32)
    how = {"readonly": True}
    arguments = {
        "scores": device.place("scores", scores, unwritten=True),
        "index_q": device.place("index_q", world.index_q, **how),
        "index_k": device.place("index_k", world.cache.index_k, **how),
        "page_table": device.place("page_table", world.batch.page_table, **how),
        "positions": device.place("positions", world.batch.positions, **how),
        "sequences": device.place("sequences", sequences(world), **how),
        "heads": heads,
        "max_pages": max_blocks,
        "max_blocks": max_blocks,
        "blocks": blocks,
        "top": chosen.top_blocks,
        "init_blocks": chosen.init_blocks,
        "local_blocks": chosen.local_blocks,
    }
    fp8 = case.index_dtype.is_fp8
    first = Key.of("scores", device.arch, fp8=fp8, index_dim=case.index_dim)
    second = Key.of("choose", device.arch)
    compiled(first, (second,))
    device.run(first, arguments, (tokens, -(-max_blocks // 4), 1))
    device.run(second, arguments, (tokens * heads, 1, 1))
    return torch.from_numpy(device.memory.fetch(blocks))


def write(device: Device, cache, packed, slots, cos, sin, norms):
    """The writer over copies of a cache's lanes: queries, index queries and the lanes after it."""
    layout, tokens = cache.layout, packed.shape[0]
    heads, dim, index_dim = layout.num_kv_heads, layout.head_dim, layout.index_dim
    index_width = (heads + 1) * index_dim if index_dim else 0
    q_heads = (packed.shape[1] - index_width) // dim - 2 * heads
    lanes = {name: device.place(name.value, lane) for name, lane in cache.lanes.items()}
    q_out = device.place("q_out", np.full((tokens, q_heads, dim), 0x7FC0, np.uint16))
    index_out = None
    if index_dim:
        poison = np.full((tokens, heads, index_dim), 0x7FC0, np.uint16)
        index_out = device.place("index_q_out", poison)
    how = {"readonly": True}
    arguments = {
        "q_out": q_out,
        "index_q_out": index_out,
        **{name.value: lanes.get(name) for name in LaneName},
        "packed": device.place("packed", packed, **how),
        "slots": device.place("slots", slots, **how),
        "cosine": device.place("cosine", cos, **how),
        "sine": device.place("sine", sin, **how),
        "q_norm": device.place("q_norm", norms.q, **how),
        "k_norm": device.place("k_norm", norms.k, **how),
        "index_q_norm": None if not index_dim else device.place("iq_norm", norms.index_q, **how),
        "index_k_norm": None if not index_dim else device.place("ik_norm", norms.index_k, **how),
        "eps": norms.eps,
        "q_heads": q_heads,
        "kv_heads": heads,
        "half": cos.shape[1],
    }
    key = Key.of(
        "write",
        device.arch,
        fp8=layout.has_scales,
        head_dim=dim,
        page=layout.page_size,
        index_dim=index_dim,
        index_fp8=layout.index_dtype.is_fp8 and index_dim > 0,
    )
    compiled(key)
    vectors = q_heads + 2 * heads + (heads + 1 if index_dim else 0)
    device.run(key, arguments, (tokens, vectors, 1))
    after = {}
    for name, pointer in lanes.items():
        raw = device.memory.fetch(pointer)
        after[name] = torch.from_numpy(raw.copy()).view(cache.lanes[name].dtype)
    q = fetch(device, q_out, (tokens, q_heads, dim))
    index_q = fetch(device, index_out, (tokens, heads, index_dim)) if index_dim else None
    return q, index_q, after


def plan(device: Device, shape: PlanShape, lengths: list[int]) -> DecodePlan:
    """The device planner's tables, over memory that held something else."""
    host = DecodePlan.over(shape, np.zeros(shape.size, np.int32))
    names = {"work": host.work, "rows": host.rows, "lengths_out": host.lengths}
    given = np.array([*lengths, -1][: max(len(lengths), 1)], np.int32)
    arguments = {
        **{n: device.place(n, np.full(a.shape, -99, np.int32)) for n, a in names.items()},
        "lengths": device.place("lengths", given, readonly=True),
        "num_seqs": len(lengths),
        "max_seqs": shape.max_seqs,
        "capacity": shape.capacity,
        "budget": shape.budget,
        "max_parts": shape.max_parts,
        "part_tiles": shape.part_tiles,
        "tile_tokens": shape.tile_tokens,
    }
    key = Key.of("plan", device.arch)
    compiled(key)
    device.run(key, arguments, (1, 1, 1))
    for name, table in names.items():
        table[:] = device.memory.fetch(arguments[name])
    return host
