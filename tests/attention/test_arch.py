"""The arch table answers by name and says where its figures are from."""

import pytest

from minuet.dtypes import DType
from minuet.errors import ConfigError
from minuet.platform import arch
from minuet.platform.arch import ARCHS


def test_unknown_arch_is_refused_with_the_table():
    with pytest.raises(ConfigError) as caught:
        arch.get("sm9000")
    text = str(caught.value)
    assert "sm9000" in text
    assert all(name in text for name in ARCHS)
    assert "--arch" in text


def test_every_figure_names_its_source():
    for row in ARCHS.values():
        for value, source in (
            (row.bandwidth_bytes_per_s, row.bandwidth_source),
            (row.bf16_flops_per_s, row.flops_source),
        ):
            assert source.startswith(("measured", "vendor") if value else "none"), row.name
    assert ARCHS["cpu"].bandwidth_bytes_per_s is None


def test_fp8_flavour_is_fnuz_on_gfx942_only_and_absent_without_a_conversion():
    flavours = {name: row.fp8 for name, row in ARCHS.items()}
    assert flavours["gfx942"] is DType.FP8_E4M3FNUZ
    assert flavours["sm80"] is None
    others = {flavours[name] for name in ARCHS if name not in ("gfx942", "sm80")}
    assert others == {DType.FP8_E4M3FN}


def test_shared_memory_and_waves_are_those_of_the_capability_table():
    facts = {n: (a.wave_size, a.shared_memory_bytes // 1024) for n, a in ARCHS.items()}
    assert facts["gfx942"] == (64, 64)
    assert facts["gfx950"] == (64, 160)
    assert facts["gfx1250"] == (32, 320)
    assert facts["sm90"] == (32, 227)
