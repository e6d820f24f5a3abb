"""Reading safetensors folders, strictly: nothing missing, nothing left over, nothing not finite.

Three steps, so that a wrong checkpoint is refused from its headers, before memory is allocated or
gigabytes are read: :func:`open_checkpoint` reads the headers, :func:`match` holds them against the
tensors a model expects, :func:`read_into` copies them to where they are used. This module knows no
model: names, shapes and what may be skipped are arguments.
"""

import json
import re
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from minuet.errors import CheckpointError
from minuet.log import get_logger

_log = get_logger(__name__)

_ACCEPTED = ("F32", "BF16", "F16")
_QUANTISED = re.compile(r"^(F8|F4|F6|U8|I8|U4|I4)")
# A tensor is copied by rows in pieces of this size: memory in use beyond the weights themselves.
_PIECE_BYTES = 64 * 2**20
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file, as its header describes it.

    Attributes:
        name: in the file.
        file: where it is.
        dtype: the format's code (``F32``, ``BF16``, ``F8_E4M3``, ...).
        shape: as stored.
        nbytes: as stored.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def open_checkpoint(folder: Path | str) -> list[StoredTensor]:
    """Read the headers of ``model.safetensors``, or of the shards that the index names.

    Raises:
        CheckpointError: no weights, a missing or truncated file, a tensor stored twice, or an index
            that contradicts the files.
    """
    folder = Path(folder)
    weight_map = _weight_map(folder)
    files = sorted(set(weight_map.values())) if weight_map is not None else ["model.safetensors"]
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: files that the index names are missing",
            got=f"{len(files) - len(absent)} of {len(files)} files, without {abbreviate(absent)}",
            expected="every file of model.safetensors.index.json",
            remedy="finish the download",
        )
    stored = [tensor for file in files for tensor in _read_header(folder / file)]
    places = defaultdict(list)
    for tensor in stored:
        places[tensor.name].append(tensor.file.name)
    _refuse_duplicates(folder, places)
    if weight_map is not None:
        _refuse_contradiction(folder, weight_map, {name: at[0] for name, at in places.items()})
    return stored


def match(
    stored: Iterable[StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    prefix: str,
    skip: Mapping[str, str],
) -> dict[str, StoredTensor]:
    """Find the stored tensor for each expected one.

    Args:
        stored: from :func:`open_checkpoint`.
        shapes: expected name, without ``prefix``, to shape.
        prefix: what stored names may begin with.
        skip: label to regular expression: stored names that another part of the model explains.

    Returns:
        Expected name to stored tensor.

    Raises:
        CheckpointError: quantised, missing, unexplained or doubly named tensors, other shapes or
            types. Each message lists every name of its kind.
    """
    kept: dict[str, list[StoredTensor]] = defaultdict(list)
    skipped: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in stored:
        label = next((k for k, pattern in skip.items() if re.search(pattern, tensor.name)), None)
        if label is None:
            kept[tensor.name.removeprefix(prefix)].append(tensor)
        else:
            skipped[label].append(tensor)
    _refuse_quantised(kept)
    missing = sorted(shapes.keys() - kept.keys())
    left_over = sorted(kept.keys() - shapes.keys())
    if missing:
        raise CheckpointError(
            "tensors are missing from the checkpoint",
            got=f"{len(kept):,} tensors" + (f", also {abbreviate(left_over)}" if left_over else ""),
            expected=f"{len(shapes):,} tensors, among them the missing {abbreviate(missing)}",
            remedy="check that config.json belongs to these weights and that no file is missing",
        )
    if left_over:
        raise CheckpointError(
            "the checkpoint holds tensors that nothing explains",
            got=abbreviate(left_over),
            expected="only tensors of the model that config.json describes",
            remedy="check that config.json belongs to these weights",
        )
    twice = {name: [t.name for t in tensors] for name, tensors in kept.items() if len(tensors) > 1}
    _refuse_duplicates(None, twice)
    matched = {name: kept[name][0] for name in shapes}
    _refuse_other_shapes(matched, shapes)
    if skipped:
        counts = ", ".join(f"{label} {len(tensors)}" for label, tensors in skipped.items())
        tensors = [tensor for group in skipped.values() for tensor in group]
        _log.info(
            "skipping %d tensors (%.1f MB) outside the text model: %s",
            len(tensors),
            sum(tensor.nbytes for tensor in tensors) / 1e6,
            counts,
        )
    return matched


def read_into(matched: Mapping[str, StoredTensor], targets: Mapping[str, Tensor]) -> None:
    """Copy every tensor to its target, cast to the target's type.

    Args:
        matched: from :func:`match`.
        targets: written; same names and shapes, any device. Views into packed tensors are fine.

    Raises:
        CheckpointError: a value is not finite, or a file cannot be read.
    """
    began = time.perf_counter()
    total = sum(tensor.nbytes for tensor in matched.values())
    files: dict[Path, list[str]] = defaultdict(list)
    for name, tensor in matched.items():
        files[tensor.file].append(name)
    # disable=None: no bar unless stderr is a terminal
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading", disable=None, delay=1.0
    ) as bar:
        for file, names in files.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as reader:
                    for name in names:
                        _copy(reader.get_slice(matched[name].name), targets[name], name)
                        bar.update(matched[name].nbytes)
            except (OSError, SafetensorError) as problem:
                raise _unreadable(file, str(problem)) from None
    seconds = time.perf_counter() - began
    _log.info(
        "read %d tensors, %.2f GB, from %d files in %.1f s",
        len(matched),
        total / 1e9,
        len(files),
        seconds,
    )


def abbreviate(names: Iterable[str], limit: int = 8) -> str:
    """All names in little space: numbers that vary become ranges, ``layers.{3-59}.o_proj``.

    Args:
        names: at least one.
        limit: forms shown; the number of the others is stated.
    """
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        numbers = tuple(int(n) for n in re.findall(r"\d+", name))
        groups[re.sub(r"\d+", "#", name)].append(numbers)
    shown = []
    for form, rows in list(groups.items())[:limit]:
        columns = [sorted(set(column)) for column in zip(*rows, strict=True)]
        text = form
        for column in columns:
            text = text.replace("#", _ranges(column), 1)
        if prod(map(len, columns)) != len(rows):
            text += f" ({len(rows)} of these)"
        shown.append(text)
    if len(groups) > limit:
        others = sum(len(rows) for rows in list(groups.values())[limit:])
        shown.append(f"and {others:,} more")
    return ", ".join(shown)


def _ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` to ``{3-5,9}``; one number stands alone."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return "{" + ",".join(runs) + "}"


# --- headers -------------------------------------------------------------------------------------


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name from the index; None for a single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return None
        found = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else None
        raise CheckpointError(
            f"no weights in {folder}",
            got=found[:8] if found is not None else "no such folder",
            expected="model.safetensors, or model.safetensors.index.json with the shards it names",
            remedy="finish the download, or use --load-format dummy to run without weights",
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(
            f"cannot read {index}", got=repr(problem), expected='{"weight_map": {tensor: file}}'
        ) from None
    if single.is_file() and single.name not in files.values():
        raise CheckpointError(
            f"two checkpoints in {folder}",
            got="model.safetensors, and an index that does not name it",
            expected="one of them",
            remedy="remove the one that is not meant",
        )
    return files


def _read_header(path: Path) -> list[StoredTensor]:
    """Tensors of one file, in the order they are stored."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise CheckpointError(
                f"{path} is a Git LFS pointer",
                got=f"{size} bytes of text",
                expected="the weights it points to",
                remedy="run `git lfs pull` in the folder",
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise _unreadable(path, f"{size:,} bytes without a valid header")
        try:
            header = json.loads(file.read(length))
            tensors = [_stored(name, path, entry) for name, entry in _entries(header)]
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise _unreadable(path, f"header: {problem!r}") from None
    promised = 8 + length + sum(tensor.nbytes for tensor in tensors)
    if promised != size:
        kind = "truncated" if size < promised else "longer than its header says"
        raise CheckpointError(
            f"{path} is {kind}",
            got=f"{size:,} bytes",
            expected=f"{promised:,} bytes",
            remedy="download the file again",
        )
    return tensors


def _entries(header: dict[str, dict[str, list[int]]]) -> list[tuple[str, dict[str, list[int]]]]:
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    return sorted(entries, key=lambda item: item[1]["data_offsets"])


def _stored(name: str, path: Path, entry: Mapping[str, list[int]]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(name, path, str(entry["dtype"]), tuple(entry["shape"]), end - begin)


def _unreadable(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read {path}",
        got=problem,
        expected="a complete safetensors file",
        remedy="download the file again",
    )


# --- refusals ------------------------------------------------------------------------------------


def _refuse_duplicates(folder: Path | None, places: Mapping[str, list[str]]) -> None:
    twice = {name: at for name, at in places.items() if len(at) > 1}
    if twice:
        name, at = next(iter(twice.items()))
        raise CheckpointError(
            f"{folder or 'checkpoint'}: tensors are stored more than once",
            got=f"{abbreviate(twice)}; {name} as {' and '.join(at)}",
            expected="every tensor once",
            remedy="remove files that belong to another download",
        )


def _refuse_contradiction(
    folder: Path, weight_map: Mapping[str, str], found: Mapping[str, str]
) -> None:
    wrong = {name for name, file in weight_map.items() if found.get(name) != file}
    wrong |= found.keys() - weight_map.keys()
    if wrong:
        name = min(wrong)
        index = f"in {weight_map[name]}" if name in weight_map else "absent"
        files = f"in {found[name]}" if name in found else "absent"
        raise CheckpointError(
            f"{folder}: the index contradicts the files about {abbreviate(sorted(wrong))}",
            got=f"{name}: {index} by the index, {files} in truth",
            expected="an index that names every tensor and its file",
            remedy="download model.safetensors.index.json and the shards from one revision",
        )


def _refuse_quantised(kept: Mapping[str, list[StoredTensor]]) -> None:
    coded = {n: t[0].dtype for n, t in kept.items() if _QUANTISED.match(t[0].dtype)}
    if coded:
        types = Counter(coded.values())
        raise CheckpointError(
            "quantised checkpoint",
            got=", ".join(f"{count:,} tensors of {code}" for code, count in types.items())
            + f": {abbreviate(sorted(coded), limit=3)}",
            expected="tensors of " + ", ".join(_ACCEPTED),
            remedy="use the BF16 checkpoint",
        )


def _refuse_other_shapes(
    matched: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for kind, wrong in (
        ("shape", {n: t.shape for n, t in matched.items() if t.shape != shapes[n]}),
        ("type", {n: t.dtype for n, t in matched.items() if t.dtype not in _ACCEPTED}),
    ):
        if wrong:
            name, got = next(iter(wrong.items()))
            raise CheckpointError(
                f"tensors with another {kind} than the model's: {abbreviate(wrong)}",
                got=f"{name} {got}",
                expected=str(shapes[name]) if kind == "shape" else ", ".join(_ACCEPTED),
                remedy="check that config.json belongs to these weights",
            )


# --- values --------------------------------------------------------------------------------------


def _copy(source: Tensor, target: Tensor, name: str) -> None:
    """Copy a stored tensor, by rows, and check what arrived.

    Args:
        source: the reader's slice: indexing it reads.
        target: written.
        name: for the message.
    """
    rows = target.shape[0]
    row_bytes = max(1, target[0].numel() * 4) if rows else 1
    step = max(1, _PIECE_BYTES // row_bytes)
    bad = 0
    for start in range(0, rows, step):
        piece = target[start : start + step]
        piece.copy_(source[start : start + step])
        low, high = torch.aminmax(piece)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad += piece.numel() - int(torch.isfinite(piece).sum())
    if bad:
        dtype = str(target.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} holds values that are not finite as {dtype}",
            got=f"{bad:,} NaN or Inf of {target.numel():,}",
            expected="finite numbers",
            remedy="download the file again; if it stays, the checkpoint itself is broken",
        )
