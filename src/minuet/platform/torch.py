"""Where our plain data meets torch: dtypes and devices."""

import ctypes
import os
import platform
from types import MappingProxyType

import torch

from minuet.dtypes import DType
from minuet.errors import ConfigError, ContractError
from minuet.platform.arch import Arch

_TO_TORCH = MappingProxyType(
    {
        DType.FP32: torch.float32,
        DType.BF16: torch.bfloat16,
        DType.FP16: torch.float16,
        DType.FP8_E4M3FN: torch.float8_e4m3fn,
        DType.FP8_E4M3FNUZ: torch.float8_e4m3fnuz,
        DType.INT32: torch.int32,
        DType.INT64: torch.int64,
    }
)
_FROM_TORCH = MappingProxyType({theirs: ours for ours, theirs in _TO_TORCH.items()})


def to_torch(dtype: DType) -> torch.dtype:
    """Torch's name of one of our types."""
    return _TO_TORCH[dtype]


def from_torch(dtype: torch.dtype) -> DType:
    """Our name of one of torch's types.

    Raises:
        ContractError: a type that Minuet stores nothing in.
    """
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise ContractError(
            "no such storage type", got=dtype, expected=", ".join(str(d) for d in DType)
        ) from None


def device_for(arch: Arch, rank: int = 0) -> torch.device:
    """The device on which a rank of ``arch`` runs; ROCm builds of torch say ``cuda`` too.

    Raises:
        ConfigError: the arch is a GPU and torch sees none with this rank.
    """
    if not arch.is_gpu:
        return torch.device("cpu")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank >= seen:
        raise ConfigError(
            f"arch {arch.name} needs a GPU for rank {rank}",
            got=f"{seen} GPUs visible to torch {torch.__version__}",
            expected=f"at least {rank + 1}",
            remedy="use --arch cpu, or install a torch build for this GPU",
        )
    return torch.device("cuda", rank)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on ``device`` is done; the CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_memory_bytes(arch: Arch) -> int | None:
    """Memory of the device at hand; None on a CPU, or where torch sees no such device."""
    if not arch.is_gpu or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def host_memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def device_facts(arch: Arch) -> dict[str, str]:
    """Name, identity and toolkit of the device at hand, for records; empty on a CPU."""
    if not arch.is_gpu:
        return {}
    seen = torch.cuda.get_device_properties(0)
    toolkit = torch.version.hip or torch.version.cuda or ""
    return {"name": seen.name, "uuid": str(seen.uuid), "toolkit": toolkit}


# mallopt parameters of glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let this process reuse freed host memory instead of returning it to the system.

    A step on the CPU allocates the same large intermediates again and again. By default glibc maps
    and unmaps each, and the page faults took a fifth of a prefill step. Serving keeps its memory
    anyway. No effect without glibc.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
