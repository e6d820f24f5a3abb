"""A folder that is not exactly the model is refused, with what was found and what to do."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minuet.dtypes import DType
from minuet.errors import CheckpointError
from minuet.models import loading, registry
from minuet.models.loading import abbreviate
from minuet.models.m3.weights import M3Weights, load_weights

LAYER = "language_model.model.layers"
EXPERT = f"{LAYER}.2.block_sparse_moe.experts"


def load(folder: Path, dtype: DType = DType.FP32) -> M3Weights:
    return load_weights(folder, registry.find(str(folder)).spec, dtype, "cpu")


class Folder:
    """A copy of a checkpoint, to be damaged."""

    def __init__(self, source: Path, path: Path):
        self.path = path / "checkpoint"
        shutil.copytree(source, self.path)

    @property
    def shards(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))

    @property
    def index(self) -> Path:
        return self.path / "model.safetensors.index.json"

    def edit(self, change: Callable[[dict[str, Tensor]], Any], shard: int = 0) -> None:
        """Rewrite one shard, and the index with it if there is one."""
        tensors = load_file(self.shards[shard])
        change(tensors)
        save_file(tensors, self.shards[shard])
        if self.index.exists():
            names = {n: p.name for p in self.shards for n in load_file(p)}
            self.index.write_text(json.dumps({"weight_map": names}))

    def refusal(self) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            load(self.path)
        assert caught.value.expected
        assert caught.value.remedy
        return caught.value


@pytest.fixture
def single(checkpoint: Callable[..., Path], tmp_path: Path) -> Folder:
    return Folder(checkpoint("tiny"), tmp_path)


@pytest.fixture
def sharded(checkpoint: Callable[..., Path], tmp_path: Path) -> Folder:
    return Folder(checkpoint("tiny", shard_bytes=300_000), tmp_path)


# --- files ---------------------------------------------------------------------------------------


def test_shards_hold_the_same_as_one_file(checkpoint: Callable[..., Path]) -> None:
    one, many = load(checkpoint("tiny")), load(checkpoint("tiny", shard_bytes=300_000))
    for (name, a), (_, b) in zip(one.tensors(), many.tensors(), strict=True):
        assert torch.equal(a, b), name


def test_folder_without_weights(single: Folder) -> None:
    single.shards[0].unlink()
    refusal = single.refusal()
    assert "no weights" in str(refusal)
    assert "config.json" in str(refusal.got)
    assert "--load-format dummy" in refusal.remedy


def test_missing_shard_is_named(sharded: Folder) -> None:
    gone = sharded.shards[1]
    gone.unlink()
    assert "of 5 files" in sharded.refusal().got
    assert "model-2-of-5" in sharded.refusal().got.replace("0", "")


@pytest.mark.parametrize("bytes_kept", [0, 4, 100, -1000, -1])
def test_truncated_file(single: Folder, bytes_kept: int) -> None:
    file = single.shards[0]
    file.write_bytes(file.read_bytes()[:bytes_kept])
    assert "model.safetensors" in str(single.refusal())


def test_truncation_says_how_many_bytes(single: Folder) -> None:
    file = single.shards[0]
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1000])
    refusal = single.refusal()
    assert (refusal.got, refusal.expected) == (f"{size - 1000:,} bytes", f"{size:,} bytes")


def test_file_with_bytes_behind_its_end(single: Folder) -> None:
    single.shards[0].write_bytes(single.shards[0].read_bytes() + b"\0" * 8)
    assert "longer than its header says" in str(single.refusal())


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": {}}', b"\xff\xff"])
def test_broken_header(single: Folder, header: bytes) -> None:
    single.shards[0].write_bytes(struct.pack("<Q", len(header)) + header)
    assert "model.safetensors" in str(single.refusal())


def test_git_lfs_pointer_is_recognised(single: Folder) -> None:
    single.shards[0].write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    assert "git lfs pull" in single.refusal().remedy


# --- index ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index(sharded: Folder, text: str) -> None:
    sharded.index.write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(sharded.path)


def test_index_with_a_tensor_in_the_wrong_file(sharded: Folder) -> None:
    index = json.loads(sharded.index.read_text())
    name = f"{LAYER}.0.self_attn.q_proj.weight"
    index["weight_map"][name] = sharded.shards[-1].name
    sharded.index.write_text(json.dumps(index))
    assert name in str(sharded.refusal())


def test_index_that_omits_a_tensor(sharded: Folder) -> None:
    index = json.loads(sharded.index.read_text())
    del index["weight_map"]["language_model.lm_head.weight"]
    sharded.index.write_text(json.dumps(index))
    assert "absent by the index" in sharded.refusal().got


def test_tensor_in_two_shards(sharded: Folder) -> None:
    name = f"{LAYER}.0.self_attn.q_proj.weight"
    sharded.edit(lambda tensors: tensors.update({name: torch.zeros(128, 64)}), shard=3)
    refusal = sharded.refusal()
    assert "more than once" in str(refusal)
    assert name in refusal.got


def test_single_file_beside_a_foreign_index(sharded: Folder) -> None:
    shutil.copy(sharded.shards[0], sharded.path / "model.safetensors")
    assert "two checkpoints" in str(sharded.refusal())


# --- names ---------------------------------------------------------------------------------------


def test_prefix_may_be_absent(checkpoint: Callable[..., Path], single: Folder) -> None:
    def strip(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    single.edit(strip)
    for (name, a), (_, b) in zip(
        load(single.path).tensors(), load(checkpoint("tiny")).tensors(), strict=True
    ):
        assert torch.equal(a, b), name


def test_tensor_with_and_without_prefix(single: Folder) -> None:
    single.edit(lambda t: t.update({"lm_head.weight": torch.zeros(640, 64)}))
    assert "language_model.lm_head.weight" in single.refusal().got


def test_all_missing_tensors_are_listed(single: Folder) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for expert in (5, 6, 7):
            for matrix in ("w1", "w2", "w3"):
                del tensors[f"{EXPERT}.{expert}.{matrix}.weight"]
        del tensors["language_model.lm_head.weight"]

    single.edit(drop)
    expected = single.refusal().expected
    assert "model.layers.2.block_sparse_moe.experts.{5-7}.w{1-3}.weight" in expected
    assert "lm_head.weight" in expected


def test_unexplained_tensors_are_listed(single: Folder) -> None:
    names = [f"{LAYER}.{idx}.self_attn.gate_proj.weight" for idx in range(4)]
    single.edit(lambda t: t.update({name: torch.zeros(2, 2) for name in names}))
    assert single.refusal().got == "model.layers.{0-3}.self_attn.gate_proj.weight"


def test_other_parts_are_skipped_and_counted(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(loading._log, "info", lambda text, *args: lines.append(text % args))
    load(checkpoint("tiny", vision_stub=True))
    skipping = [line for line in lines if "skipping" in line]
    assert len(skipping) == 1
    assert "27 tensors (0.3 MB)" in skipping[0]
    for part in ("vision_tower 19", "multi_modal_projector 4", "patch_merge_mlp 4"):
        assert part in skipping[0]


def test_mtp_is_skipped_anywhere_in_a_name(single: Folder) -> None:
    extra = {
        f"{name}.0.enorm.weight": torch.zeros(64) for name in ("mtp", "language_model.model.mtp")
    }
    single.edit(lambda t: t.update(extra))
    load(single.path)


# --- tensors -------------------------------------------------------------------------------------


def test_other_shape(single: Folder) -> None:
    name = f"{LAYER}.0.self_attn.o_proj.weight"
    single.edit(lambda t: t.update({name: t[name].T.contiguous()}))
    refusal = single.refusal()
    assert "(128, 64)" in refusal.got
    assert refusal.expected == "(64, 128)"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_quantised_checkpoint(single: Folder, dtype: torch.dtype) -> None:
    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            tensors[name] = tensors[name].to(dtype)
            tensors[name + "_scale_inv"] = torch.zeros(2, 2, dtype=torch.uint8)

    single.edit(quantise)
    refusal = single.refusal()
    assert "quantised checkpoint" in str(refusal)
    assert "BF16" in refusal.remedy


def test_other_type(single: Folder) -> None:
    name = "language_model.lm_head.weight"
    single.edit(lambda t: t.update({name: t[name].double()}))
    assert "F64" in single.refusal().got


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_counted(single: Folder, value: float) -> None:
    name = f"{EXPERT}.3.w3.weight"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name][3, 4:7] = value

    single.edit(spoil)
    refusal = single.refusal()
    assert name.removeprefix("language_model.") in str(refusal)
    assert refusal.got == "3 NaN or Inf of 2,048"


def test_value_too_large_for_the_compute_type(single: Folder) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["language_model.lm_head.weight"][0, 0] = 3.4e38

    single.edit(spoil)
    load(single.path)
    with pytest.raises(CheckpointError, match="bfloat16"):
        load(single.path, DType.BF16)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", [DType.FP32, DType.BF16])
def test_stored_types_are_cast(single: Folder, stored: torch.dtype, compute: DType) -> None:
    name = f"{LAYER}.0.self_attn.k_proj.weight"
    single.edit(lambda t: t.update({n: v.to(stored) for n, v in t.items()}))
    weights = load(single.path, compute)
    wanted = load_file(single.shards[0])[name].to(weights.embed.dtype)
    assert torch.equal(weights.layers[0].qkv[128:160], wanted)


def test_tensors_larger_than_a_piece_arrive_whole(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("tiny")
    whole = load(folder)
    monkeypatch.setattr(loading, "_PIECE_BYTES", 1000)  # 3 rows of 64 FP32
    for (name, a), (_, b) in zip(load(folder).tensors(), whole.tensors(), strict=True):
        assert torch.equal(a, b), name


# --- abbreviation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a.b"], "a.b"),
        (["l.3.x", "l.4.x", "l.5.x", "l.9.x"], "l.{3-5,9}.x"),
        (["l.1.e.0", "l.1.e.1", "l.2.e.0", "l.2.e.1"], "l.{1-2}.e.{0-1}"),
        (["l.1.e.0", "l.2.e.1"], "l.{1-2}.e.{0-1} (2 of these)"),
        (["a", "b", "c"], "a, b, and 1 more"),
    ],
)
def test_names_are_abbreviated_without_loss(names: list[str], shown: str) -> None:
    assert abbreviate(names, limit=2) == shown
