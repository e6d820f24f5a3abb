"""The seal counts what compiles and what grows, and forgives nothing that was not declared."""

import logging
from dataclasses import dataclass, field

import pytest
import torch

from minuet.engine.seal import Counters, Seal
from minuet.errors import SealError
from minuet.platform import compilation
from minuet.platform.device import Host


@dataclass
class Device(Host):
    """A device whose allocator does what the test says."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    taken: list[int] = field(default_factory=lambda: [1000])

    def allocations(self) -> int:
        return len(self.taken)

    def reserved_bytes(self) -> int:
        return sum(self.taken)


def sealed(mode: str, limit: int | None = None) -> tuple[Seal, Device]:
    device = Device()
    seal = Seal(device, mode, limit)
    seal.close()
    return seal, device


def test_nothing_is_counted_before_ready():
    device = Device()
    seal = Seal(device, "strict")
    device.taken.append(10)
    compilation.note("early")
    seal.check(decode=True)
    assert seal.counters() == Counters()


def test_a_compilation_after_ready_raises_once_by_name_and_stays_counted():
    seal, _ = sealed("strict")
    compilation.note("triton some.kernel")
    with pytest.raises(SealError, match=r"some\.kernel"):
        seal.check(decode=True)
    seal.check(decode=True)
    assert seal.counters().compilations == 1
    assert seal.counters().compiled == ("triton some.kernel",)


def test_decoding_may_take_nothing():
    seal, device = sealed("strict", limit=10**6)
    device.taken.append(512)
    with pytest.raises(SealError, match="512 bytes"):
        seal.check(decode=True)
    assert seal.counters().decode_growth_bytes == seal.counters().growth_bytes == 512


def test_a_prefill_may_take_what_was_declared_and_no_more():
    seal, device = sealed("strict", limit=2000)
    device.taken.append(1000)
    seal.check(decode=False)
    device.taken.append(1)
    with pytest.raises(SealError, match="2001 of 2000 declared"):
        seal.check(decode=False)
    assert seal.counters() == Counters(0, 1001, 0, ())


def test_warn_logs_and_serves_on(caplog):
    seal, device = sealed("warn")
    device.taken.append(4096)
    with caplog.at_level(logging.WARNING, logger="minuet"):
        seal.check(decode=True)
    assert "4096 bytes" in caplog.text
    assert seal.counters().growth_bytes == 4096


def test_tritons_compilations_are_noticed_and_other_hooks_still_called(monkeypatch):
    triton = pytest.importorskip("triton")
    seen = []
    monkeypatch.setattr(compilation, "_hooked", [])
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **said: seen.append(said)
    )
    before = compilation.count()

    class Kernel:
        module, name = "a.module", "kernel"

    triton.knobs.runtime.jit_post_compile_hook(fn=Kernel, repr="kernel()")
    assert compilation.count() == before + 1
    assert compilation.names()[-1] == "triton a.module.kernel"
    assert len(seen) == 1
