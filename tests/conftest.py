"""What every test may use: checkpoint folders, written once per session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minuet.models.m3.export import make_checkpoint


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("tiny", layers=2) -> folder``; the arguments of ``make_checkpoint``.

    Folders are shared: a test that changes one writes its own.
    """
    written: dict[str, Path] = {}

    def get(preset: str = "tiny", **options: Any) -> Path:
        key = repr((preset, sorted(options.items())))
        if key not in written:
            folder = tmp_path_factory.mktemp(preset)
            written[key] = make_checkpoint(folder, preset=preset, **options)
        return written[key]

    return get
