"""Data types as facts: size, largest value, whether values need a scale. No torch here.

``platform/torch.py`` maps a :class:`DType` to the framework's type. The largest finite value of an
FP8 flavour lives here and nowhere else: a literal 448 or 240 in a kernel is a defect.
"""

from enum import Enum

from minuet.errors import ConfigError


class DType(Enum):
    """A storage type. The value is the canonical name users type."""

    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"
    FP8_E4M3FN = "fp8_e4m3fn"
    FP8_E4M3FNUZ = "fp8_e4m3fnuz"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def max_value(self) -> float:
        """Largest finite value; floating types only (KeyError otherwise: a bug of the caller)."""
        return _MAX[self]

    @property
    def is_fp8(self) -> bool:
        """Stored as one byte with a per-token scale (K and V) or as it is (index keys)."""
        return self in (DType.FP8_E4M3FN, DType.FP8_E4M3FNUZ)

    def __str__(self) -> str:
        """The canonical name."""
        return self.value


_ITEMSIZE = {
    DType.FP32: 4,
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP8_E4M3FN: 1,
    DType.FP8_E4M3FNUZ: 1,
    DType.INT32: 4,
    DType.INT64: 8,
}

# OCP 8-bit floating point specification 1.0 (e4m3fn: S.1111.110 = 448) and the "fnuz" form of
# gfx942 (bias 8, no negative zero: S.1111.111 = 240).
_MAX = {
    DType.FP32: 3.4028234663852886e38,
    DType.BF16: 3.3895313892515355e38,
    DType.FP16: 65504.0,
    DType.FP8_E4M3FN: 448.0,
    DType.FP8_E4M3FNUZ: 240.0,
}

_COMPUTE_NAMES = {
    "float32": DType.FP32,
    "fp32": DType.FP32,
    "bfloat16": DType.BF16,
    "bf16": DType.BF16,
    "float16": DType.FP16,
    "fp16": DType.FP16,
}
_CACHE_NAMES = {
    **_COMPUTE_NAMES,
    "fp8_e4m3": DType.FP8_E4M3FN,
    "fp8_e4m3fn": DType.FP8_E4M3FN,
    "fp8_e4m3fnuz": DType.FP8_E4M3FNUZ,
}


def parse_compute_dtype(name: str) -> DType:
    """Type of weights and activations from what a user or ``config.json`` wrote.

    Raises:
        ConfigError: the name is not a 16- or 32-bit floating type.
    """
    try:
        return _COMPUTE_NAMES[name.lower().removeprefix("torch.")]
    except KeyError:
        raise ConfigError(
            "unknown dtype", got=name, expected="one of " + ", ".join(sorted(_COMPUTE_NAMES))
        ) from None


def parse_cache_dtype(name: str, *, auto: DType, fp8: DType | None, flag: str) -> DType:
    """Type of a cache lane from its flag.

    Args:
        name: what the user wrote; ``auto`` follows the model, ``fp8`` follows the arch.
        auto: the model's compute dtype.
        fp8: FP8 flavour of the arch (:attr:`minuet.platform.arch.Arch.fp8`), None if it has none.
        flag: the flag's name, for the message.

    Raises:
        ConfigError: unknown name, or ``fp8`` on an arch without FP8.
    """
    key = name.lower()
    if key == "auto":
        return auto
    if key == "fp8":
        if fp8 is None:
            raise ConfigError(
                f"{flag} fp8 needs an arch with an FP8 format",
                got="fp8",
                expected="auto, bfloat16 or an explicit flavour",
                remedy=f"use {flag} bfloat16",
            )
        return fp8
    try:
        return _CACHE_NAMES[key]
    except KeyError:
        raise ConfigError(
            f"unknown value for {flag}", got=name, expected=", ".join(CACHE_DTYPE_CHOICES)
        ) from None


CACHE_DTYPE_CHOICES = ("auto", "fp8", *sorted(_CACHE_NAMES))
COMPUTE_DTYPE_CHOICES = ("auto", *sorted(_COMPUTE_NAMES))
