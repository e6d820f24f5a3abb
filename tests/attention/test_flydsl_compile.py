"""Compilation apart: what is compiled, what is refused, what is kept, and the guard of a launch."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minuet.attention import workspace
from minuet.attention.backends.flydsl import compile as fly_compile
from minuet.attention.backends.flydsl import spec
from minuet.attention.backends.flydsl.compile import CompileError, Report, judge, text_bytes
from minuet.attention.backends.flydsl.signatures import SIGNATURES, Key
from minuet.attention.backends.flydsl.toolchain import toolchain
from minuet.attention.batch import AttentionBatch
from minuet.attention.capability import Level, StepSizes, covers
from minuet.attention.contract import LayerKind, Op
from minuet.errors import ConfigError
from minuet.kv.layout import Form
from minuet.platform.arch import ARCHS
from tests.attention.flydsl_cases import main_keys
from tests.attention.problems import DENSE, SPARSE

KEY = Key.of("choose", "gfx950")
GOOD = Report("choose", 20, 30, 0, 0, 0, {}, 900, "triton")
TARGETS = ("gfx942", "gfx950", "gfx1250")


# --- compiled code -------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_compiles_without_spills_within_half_the_lds(arch):
    pytest.importorskip("flydsl")
    from tests.attention.flydsl_sim import compiled

    for result in compiled(*main_keys(arch)):
        report, options = result.report, dict(result.key.options)
        assert report.spills == report.scratch_bytes == 0, result.key.name
        assert report.lds_bytes <= ARCHS[arch].shared_memory_bytes // 2, result.key.name
        assert report.code_bytes > 0
        # scores: 4 tiles of 16 tokens; output: head_dim / 16 tiles; each over the instruction's k
        depth = 16 if arch == "gfx942" else 32
        mnemonic = {
            "gfx942": "v_mfma_f32_16x16x16_bf16",
            "gfx950": "v_mfma_f32_16x16x32_bf16",
            "gfx1250": "v_wmma_f32_16x16x32_bf16",
        }[arch]
        expected = {}
        if result.key.kernel == "attend":
            dim = options["head_dim"]
            expected = {mnemonic: 4 * dim // depth + dim // 16 * 64 // depth}
        if result.key.kernel == "scores":
            expected = {mnemonic: 8 * options["index_dim"] // depth}
        assert report.matrix == expected, result.key.name


@pytest.mark.compile
@pytest.mark.timeout(600)
def test_the_documented_table_is_of_this_code():
    pytest.importorskip("flydsl")
    from importlib.metadata import version

    from minuet.attention.backends.flydsl import report
    from tests.attention.flydsl_sim import compiled

    page = (Path(__file__).parents[2] / "docs" / "amd.md").read_text()
    if f"flydsl {version('flydsl')}." not in page:
        pytest.skip("the table is of another version of the compiler")
    keys = [key for arch in TARGETS for key in report.keys(arch)]
    assert {key for arch in TARGETS for key in main_keys(arch)} >= set(keys)
    for key in keys:
        (result,) = compiled(key)
        row = report.table({key: result}).splitlines()[-1]
        assert row in page, f"python -m minuet.attention.backends.flydsl.report docs/amd.md: {row}"


LAUNCH = """
import sys, types
from pathlib import Path
import torch
from minuet.attention.backends.flydsl import calls
from minuet.attention.backends.flydsl.signatures import Key

# a device that is not there; the compiler is told to stop short of launching
calls.require_rocm = lambda: None
card = types.SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256)
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda device: card
torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=0)
runner = calls.RocmRunner(Path(sys.argv[1]))
key = Key.of("merge", runner.arch, head_dim=128, planned=sys.argv[2] == "True")
runner._launchers[key] = runner._load(key)
data = torch.zeros(64)
numbers = dict(kv_heads=1, group=4, query_len=1, slots=0, parts=1)
tensors = dict(out=data, partial_out=None, partial_lse=None, rows=data.view(torch.int32))
runner([calls.Call(key, {**tensors, **numbers}, (1, 1, 1))])
"""


@pytest.mark.compile
@pytest.mark.timeout(600)
def test_a_launch_finds_what_was_compiled_apart(tmp_path):
    """Up to the launch itself: types of arguments, and the object cache between two processes."""
    pytest.importorskip("flydsl")
    key = Key.of("merge", "gfx950", head_dim=128, planned=True)
    fly_compile.compile_all([key], tmp_path, objects=True)
    given = fly_compile.worker_environment("gfx950", tmp_path, toolchain(tmp_path), None)
    given["FLYDSL_RUNTIME_RUN_ONLY"] = "1"  # a cache miss is an error

    def launch(planned):
        command = [sys.executable, "-c", LAUNCH, str(tmp_path), str(planned)]
        return subprocess.run(command, env=given, capture_output=True, text=True, check=False)

    found = launch(True)
    assert found.returncode == 0, found.stderr
    assert "cache" in launch(False).stderr.lower(), "what was not compiled is not found"


@pytest.mark.compile
@pytest.mark.timeout(600)
def test_lds_overflow_which_the_compiler_only_prints_is_an_error(tmp_path):
    pytest.importorskip("flydsl")
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    given = fly_compile.worker_environment("gfx942", tmp_path, toolchain(tmp_path), str(scratch))
    given["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "tests.attention.flydsl_big", str(out), str(scratch)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = fly_compile.read_report((out / "kernel.s").read_text(), b"", "none")
    assert report.lds_bytes == 70_000
    printed = (out / "stderr.txt").read_text()
    for stderr in (printed, ""):  # either sign is enough
        with pytest.raises(CompileError, match="70000"):
            judge(replace(KEY, arch="gfx942"), report, stderr)


# --- judgement, cache ----------------------------------------------------------------------------


def test_what_the_compiler_lets_pass_is_refused():
    judge(KEY, GOOD, "warning: nothing of note\n")
    with pytest.raises(CompileError, match="local memory"):
        judge(KEY, GOOD, "error: local memory (70000) exceeds limit (65536) in function 'k'\n")
    with pytest.raises(CompileError, match="163840"):
        judge(KEY, replace(GOOD, lds_bytes=163_841), "")
    with pytest.raises(CompileError, match="spills 3"):
        judge(KEY, replace(GOOD, spills=3), "")


@pytest.fixture
def fake_worker(monkeypatch, tmp_path):
    """``compile_all`` with a worker made of a line of Python."""

    real = subprocess.run

    def install(line):
        def run(command, **how):
            return real([command[0], "-c", line], **how)

        monkeypatch.setattr(fly_compile.subprocess, "run", run)
        monkeypatch.setattr(fly_compile, "available", lambda: True)
        return tmp_path / "cache"

    return install


WRITES = """
import json, sys
from pathlib import Path
for entry in json.load(sys.stdin)["kernels"]:
    out = Path(entry["out"])
    (out / "stderr.txt").write_text({stderr!r})
    (out / "kernel.ll").write_text("ir")
    (out / "kernel.o").write_bytes(b"")
    (out / "kernel.s").write_text(".amdhsa_kernel choose\\n .vgpr_count: 7\\n")
"""


def test_a_compiler_that_ends_the_process_is_an_error_and_not_our_end(fake_worker):
    cache = fake_worker("import os; print('Cannot select'); os.abort()")
    with pytest.raises(CompileError, match=r"ended with -6"):
        fly_compile.compile_all([KEY], cache)


def test_results_are_kept_by_arch_versions_and_source(fake_worker, monkeypatch):
    cache = fake_worker(WRITES.format(stderr=""))
    first = fly_compile.compile_all([KEY], cache)[KEY]
    assert first.report.vgprs == 7
    fake_worker("raise SystemExit('compiled twice')")
    assert fly_compile.compile_all([KEY], cache)[KEY] == first
    for other in (replace(KEY, arch="gfx942"), KEY):
        if other is KEY:
            monkeypatch.setattr(fly_compile, "fingerprint", lambda: "of other sources")
        with pytest.raises(CompileError):
            fly_compile.compile_all([other], cache)


def test_a_result_that_was_refused_is_not_kept(fake_worker):
    cache = fake_worker(WRITES.format(stderr="error: local memory (70000) exceeds limit"))
    for _ in range(2):
        with pytest.raises(CompileError, match="local memory"):
            fly_compile.compile_all([KEY], cache)


def test_without_flydsl_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(fly_compile, "available", lambda: False)
    with pytest.raises(ConfigError, match="flydsl") as caught:
        fly_compile.compile_all([KEY], tmp_path)
    assert "minuet[amd]" in str(caught.value)


def test_the_compiling_process_inherits_nothing(tmp_path):
    tools = toolchain(tmp_path)
    given = fly_compile.worker_environment("gfx1250", tmp_path, tools, None)
    assert given["ARCH"] == given["FLYDSL_GPU_ARCH"] == "gfx1250"
    assert given["HOME"] == str(tmp_path)
    assert not {*given} & {"LD_PRELOAD", "FLYDSL_DUMP_IR", "LD_LIBRARY_PATH"}
    assert (tools.root / "llvm/bin/ld.lld").exists()
    assert os.access(tools.root / "llvm/bin/ld.lld", os.X_OK)


def test_only_elf_files_have_code():
    assert text_bytes(b"") == text_bytes(b"not an object") == 0


# --- the guard of a launch, and what the tables say ----------------------------------------------


def test_without_rocm_a_launch_is_refused_and_the_process_goes_on():
    pytest.importorskip("flydsl")
    if torch.version.hip:
        pytest.skip("this is a ROCm build")
    from minuet.attention.backends.flydsl import launch

    batch = AttentionBatch(
        (1,), (1,), torch.tensor([0]), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32)
    )
    with pytest.raises(ConfigError, match="ROCm"):
        launch.plan(batch, 128)


def test_levels_say_simulated_and_not_device():
    for kernel in spec.CAPABILITIES:
        assert set(kernel.level) == set(TARGETS)
        assert set(kernel.level.values()) == {Level.SIMULATED}


@pytest.mark.parametrize("arch", TARGETS)
def test_a_prefill_of_65536_tokens_and_two_kv_heads_is_covered(arch):
    sizes = StepSizes(num_seqs=64, query_tokens=65_536, max_length=131_072, score_bytes=256 * 2**20)
    fp8 = ARCHS[arch].fp8
    for problem in (DENSE, SPARSE, replace(SPARSE, op=Op.SELECT)):
        heads = {"num_q_heads": 32, "num_kv_heads": 2, "form": Form.SHUFFLE, "kv_dtype": fp8}
        if problem.layer_kind is LayerKind.SPARSE:
            heads |= {"index_heads": 2, "index_dtype": fp8}
        asked = replace(problem, **heads)
        (kernel,) = (
            k for k in spec.CAPABILITIES if k.op is asked.op and asked.layer_kind in k.layer_kinds
        )
        assert covers(kernel, asked, ARCHS[arch]) == ()
        assert workspace.covers_step(kernel, asked, sizes) == ()


def test_no_signature_has_a_batch_or_a_length_among_its_options():
    for arch in TARGETS:
        for key in main_keys(arch):
            names = {name for name, _ in key.options}
            assert names <= {
                "fp8",
                "head_dim",
                "page",
                "mode",
                "planned",
                "index_dim",
                "index_fp8",
            }
            assert key.kernel in SIGNATURES
