"""The table of docs/amd.md: what the machine code of each specialisation needs.

``python -m minuet.attention.backends.flydsl.report docs/amd.md`` compiles and writes it between two
marks. It holds facts of the compiler's output, no measurement: registers, LDS, matrix instructions
in the text (a loop body counts once) and bytes of code.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from minuet.attention.backends.flydsl.compile import Compiled, compile_all
from minuet.attention.backends.flydsl.launch import CACHE_DIR
from minuet.attention.backends.flydsl.signatures import Key, specialisations
from minuet.attention.contract import LayerKind, Op, Phase, Problem
from minuet.dtypes import DType
from minuet.kv.layout import Form
from minuet.platform.arch import ARCHS

START, END = "<!-- report: start -->", "<!-- report: end -->"
TARGETS = ("gfx942", "gfx950", "gfx1250")


def keys(arch: str) -> list[Key]:
    """Specialisations of one rank's share of 64 query and 4 KV heads on 4 ranks, both caches."""
    fp8 = ARCHS[arch].fp8
    assert fp8 is not None
    dense = Problem(
        op=Op.ATTEND,
        layer_kind=LayerKind.DENSE,
        phase=Phase.DECODE,
        num_q_heads=16,
        num_kv_heads=1,
        head_dim=128,
        page_size=128,
        q_dtype=DType.BF16,
        kv_dtype=DType.BF16,
        form=Form.SHUFFLE,
    )
    sparse = replace(
        dense, layer_kind=LayerKind.SPARSE, index_dim=128, index_heads=1, top_blocks=16
    )
    found: dict[Key, None] = {}
    for kind in (DType.BF16, fp8):
        problems = [
            replace(dense, kv_dtype=kind),
            replace(dense, kv_dtype=kind, phase=Phase.PREFILL),
            replace(sparse, kv_dtype=kind, index_dtype=kind),
            replace(sparse, kv_dtype=kind, index_dtype=kind, op=Op.SELECT),
            replace(sparse, kv_dtype=kind, index_dtype=kind, op=Op.WRITE),
        ]
        for problem in problems:
            found |= dict.fromkeys(specialisations(problem, arch))
    return list(found)


def table(compiled: Mapping[Key, Compiled]) -> str:
    """Markdown, one row per specialisation and arch."""
    lines = [
        f"Compiled with flydsl {version('flydsl')}.",
        "",
        "| kernel | arch | VGPR | SGPR | LDS bytes | spills | matrix instructions | code bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, result in compiled.items():
        report = result.report
        matrix = ", ".join(f"{count} `{name}`" for name, count in report.matrix.items()) or "-"
        lines.append(
            f"| {_title(key)} | {key.arch} | {report.vgprs} | {report.sgprs} | {report.lds_bytes} "
            f"| {report.spills} | {matrix} | {report.code_bytes} |"
        )
    return "\n".join(lines)


def _title(key: Key) -> str:
    options = dict(key.options)
    words = [key.kernel]
    if "mode" in options:
        words.append(str(options["mode"]))
    if "planned" in options:
        words.append("planned" if options["planned"] else "rows")
    if "fp8" in options:
        words.append("FP8" if options["fp8"] else "BF16")
    return " ".join(words)


def insert(page: str, text: str) -> str:
    """A page with the text between its marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{text}\n{END}{after}"


def main() -> None:
    """Compile everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--cache", type=Path, default=CACHE_DIR)
    chosen = parser.parse_args()
    wanted = [key for arch in TARGETS for key in keys(arch)]
    results = compile_all(wanted, chosen.cache)
    ordered = {key: results[key] for key in sorted(wanted, key=lambda k: (k.kernel, k.name))}
    chosen.page.write_text(insert(chosen.page.read_text(), table(ordered)))


if __name__ == "__main__":
    main()
