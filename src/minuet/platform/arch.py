"""One row per arch: the only place where a fact of a chip is written down.

An arch is an instruction set, a row describes one card of it (:attr:`Arch.card`), because
bandwidth, memory and compute units are a card's. A detected device replaces what it can report.
Every figure that a time or a limit is computed from names its source: a **measurement** is used
where there is one, a **vendor** figure otherwise, and nothing where neither exists (the CPU).

Memory of a card nobody of us has held is the vendor's number in decimal gigabytes, which is below
what drivers report, so a plan made without the device errs on the safe side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minuet.dtypes import DType
from minuet.errors import ConfigError

_KIB, _GIB, _GB, _TB, _TFLOP = 2**10, 2**30, 10**9, 10**12, 10**12


# Compared by identity: rows are singletons, and a Choice is looked up by arch on the host path.
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Arch:
    """Facts of one arch.

    Attributes:
        name: as flags spell it (``sm90``, ``gfx950``).
        vendor: ``cpu``, ``nvidia`` or ``amd``.
        card: the card whose figures stand in the row.
        wave_size: lanes that execute together (warp, wave); 1 on a CPU.
        shared_memory_bytes: shared memory (LDS) one workgroup may use; 0 on a CPU.
        compute_units: SMs or CUs; 1 on a CPU, whose cores are the tensor library's business.
        fp8: the FP8 flavour that ``fp8`` means here; None where device code cannot convert it.
        bandwidth_bytes_per_s: memory read bandwidth, the denominator of every roofline; None
            where no claim is made.
        bandwidth_source: where that figure is from.
        memory_bytes: memory of the card; None where it is the host's.
        memory_source: where that figure is from.
        bf16_flops_per_s: dense BF16 matrix throughput; None where no claim is made.
        flops_source: where that figure is from.
        ops: the table of operations outside attention (``ops/table.py``).
    """

    name: str
    vendor: str
    card: str
    wave_size: int
    shared_memory_bytes: int
    compute_units: int
    fp8: DType | None
    bandwidth_bytes_per_s: int | None
    bandwidth_source: str
    memory_bytes: int | None
    memory_source: str
    bf16_flops_per_s: int | None
    flops_source: str
    ops: str = "triton"

    @property
    def is_gpu(self) -> bool:
        """Whether kernels are compiled for it; False only for ``cpu``."""
        return self.vendor != "cpu"


_ROWS = (
    Arch(
        name="cpu",
        vendor="cpu",
        card="any",
        wave_size=1,
        shared_memory_bytes=0,
        compute_units=1,
        fp8=DType.FP8_E4M3FN,  # stored and converted in software
        bandwidth_bytes_per_s=None,
        bandwidth_source="none: the CPU path is for correctness, no speed is claimed",
        memory_bytes=None,
        memory_source="the host's",
        bf16_flops_per_s=None,
        flops_source="none",
        ops="reference",
    ),
    Arch(
        name="sm80",
        vendor="nvidia",
        card="A100 SXM 80GB",
        wave_size=32,
        shared_memory_bytes=163 * _KIB,
        compute_units=108,
        # No FP8 units, and Triton emits the e4m3fn conversion from compute capability 8.9 on
        # only: reading an FP8 cache here would need a bit-trick path that nobody has asked for.
        fp8=None,
        bandwidth_bytes_per_s=2_039 * _GB,
        bandwidth_source="vendor: A100 80GB SXM data sheet, 2,039 GB/s",
        memory_bytes=80 * _GB,
        memory_source="vendor: 80 GB",
        bf16_flops_per_s=312 * _TFLOP,
        flops_source="vendor: A100 data sheet, dense",
    ),
    Arch(
        name="sm90",
        vendor="nvidia",
        card="H200 SXM",
        wave_size=32,
        shared_memory_bytes=227 * _KIB,
        compute_units=132,
        fp8=DType.FP8_E4M3FN,
        bandwidth_bytes_per_s=4_680 * _GB,
        bandwidth_source="measured: 4.59-4.68 TB/s read by a plain kernel on one H200, 2026-11-29; "
        "vendor 4.8",
        memory_bytes=139 * _GIB,
        memory_source="measured: about 139 GiB reported by the driver of one H200; vendor 141 GB",
        bf16_flops_per_s=989 * _TFLOP,
        flops_source="vendor: H200 data sheet, dense (half of the sparse figure)",
    ),
    Arch(
        name="sm100",
        vendor="nvidia",
        card="B200",
        wave_size=32,
        shared_memory_bytes=227 * _KIB,
        compute_units=148,
        fp8=DType.FP8_E4M3FN,
        bandwidth_bytes_per_s=8 * _TB,
        bandwidth_source="vendor: 8 TB/s",
        memory_bytes=180 * _GB,
        memory_source="vendor: 180 GB",
        bf16_flops_per_s=2_250 * _TFLOP,
        flops_source="vendor: B200 data sheet, dense (half of the sparse figure)",
    ),
    Arch(
        name="sm120",
        vendor="nvidia",
        card="RTX PRO 6000 Blackwell",
        wave_size=32,
        shared_memory_bytes=99 * _KIB,
        compute_units=188,
        fp8=DType.FP8_E4M3FN,
        bandwidth_bytes_per_s=1_792 * _GB,
        bandwidth_source="vendor: 1,792 GB/s",
        memory_bytes=96 * _GB,
        memory_source="vendor: 96 GB",
        bf16_flops_per_s=None,
        flops_source="none: not established for this card",
    ),
    Arch(
        name="gfx942",
        vendor="amd",
        card="MI300X",
        wave_size=64,
        shared_memory_bytes=64 * _KIB,
        compute_units=304,
        fp8=DType.FP8_E4M3FNUZ,
        bandwidth_bytes_per_s=5_300 * _GB,
        bandwidth_source="vendor: 5.3 TB/s",
        memory_bytes=192 * _GB,
        memory_source="vendor: 192 GB",
        bf16_flops_per_s=1_307 * _TFLOP,
        flops_source="vendor: MI300X data sheet, dense",
    ),
    Arch(
        name="gfx950",
        vendor="amd",
        card="MI355X",
        wave_size=64,
        shared_memory_bytes=160 * _KIB,
        compute_units=256,
        fp8=DType.FP8_E4M3FN,
        bandwidth_bytes_per_s=8 * _TB,
        bandwidth_source="vendor: 8 TB/s",
        memory_bytes=288 * _GB,
        memory_source="vendor: 288 GB",
        bf16_flops_per_s=2_500 * _TFLOP,
        flops_source="vendor: MI355X data sheet, dense, rounded down",
    ),
    Arch(
        name="gfx1250",
        vendor="amd",
        card="MI455X",
        wave_size=32,
        shared_memory_bytes=320 * _KIB,
        compute_units=256,
        fp8=DType.FP8_E4M3FN,
        bandwidth_bytes_per_s=19_600 * _GB,
        bandwidth_source="vendor: 19.6 TB/s announced; 19.44 published for contiguous reads, "
        "the runtime reports 23.35; not measured by us",
        memory_bytes=432 * _GB,
        memory_source="vendor: 432 GB announced",
        bf16_flops_per_s=None,
        flops_source="none: announced for FP8 and FP4 only",
    ),
)

ARCHS: Mapping[str, Arch] = MappingProxyType({row.name: row for row in _ROWS})


def get(name: str) -> Arch:
    """The row of one arch.

    Raises:
        ConfigError: no such row; the message lists the table.
    """
    try:
        return ARCHS[name]
    except KeyError:
        raise ConfigError(
            "unknown arch",
            got=name,
            expected="one of " + ", ".join(ARCHS),
            remedy="pass --arch with one of these, or add a row to platform/arch.py",
        ) from None
