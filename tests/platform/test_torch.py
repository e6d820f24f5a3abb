"""Every storage type has its torch type and back; a device that is not there is refused."""

import pytest
import torch

from minuet.dtypes import DType
from minuet.errors import ConfigError, ContractError
from minuet.platform import arch
from minuet.platform.torch import device_for, from_torch, to_torch


@pytest.mark.parametrize("dtype", list(DType))
def test_types_map_both_ways(dtype: DType) -> None:
    assert from_torch(to_torch(dtype)) is dtype
    assert torch.empty(3, dtype=to_torch(dtype)).nbytes == 3 * dtype.itemsize


@pytest.mark.parametrize(
    "dtype", [DType.FP32, DType.BF16, DType.FP16, DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ]
)
def test_largest_values_are_torchs(dtype: DType) -> None:
    assert dtype.max_value == torch.finfo(to_torch(dtype)).max


def test_type_that_nothing_is_stored_in() -> None:
    with pytest.raises(ContractError, match="complex64"):
        from_torch(torch.complex64)


def test_cpu_arch_runs_on_the_cpu() -> None:
    assert device_for(arch.get("cpu")) == torch.device("cpu")


def test_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_for(arch.get("sm90"), 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="2 GPUs visible") as refusal:
        device_for(arch.get("sm90"), 2)
    assert "--arch cpu" in refusal.value.remedy
