"""`minuet generate` as a person runs it: answers, JSON, prompt files, refusals, exit codes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from minuet.cli import main
from minuet.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("tiny")


def run(capsys, *words) -> tuple[int, str, str]:
    code = main(["generate", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


COMMON = ("--kv-cache-pages", 64, "--max-tokens", 5, "--temperature", 0, "--ignore-eos")


def test_json_has_one_object_per_prompt_in_order_with_ids_text_logprobs_and_timings(folder, capsys):
    code, out, _ = run(
        capsys, folder, *COMMON, "--json", "--logprobs", 2, "--prompt", "Hello",
        "--prompt-token-ids", "5,6,7", "--stop-token-ids", "1",
    )  # fmt: skip
    assert code == 0
    first, second = map(json.loads, out.splitlines())
    tokenizer = Tokenizer.load(folder)
    assert first["prompt_token_ids"] == tokenizer.encode("Hello")
    assert second["prompt_token_ids"] == [5, 6, 7]
    for item in (first, second):
        assert len(item["token_ids"]) == len(item["logprobs"]) == 5
        assert item["finish_reason"] == "length"
        assert item["text"] == tokenizer.decode(item["token_ids"])
        assert item["cached_tokens"] == 0
        assert 0 < item["timings"]["first_token_s"] <= item["timings"]["total_s"]
        assert [r["token_id"] for r in item["logprobs"]] == item["token_ids"]
        assert all(r["rank"] == 1 and len(r["top"]) == 2 for r in item["logprobs"])


def test_a_prompts_file_may_mix_text_and_objects_with_their_own_fields(folder, capsys, tmp_path):
    lines = ["plain text", json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}), '{"prompt": "x"}']
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n")
    code, out, _ = run(capsys, folder, *COMMON, "--json", "--quiet", "--prompts-file", file)
    assert code == 0
    assert [len(json.loads(line)["token_ids"]) for line in out.splitlines()] == [5, 2, 5]


def test_chat_puts_a_text_into_the_models_template_and_leaves_ids_alone(folder, capsys):
    code, out, _ = run(
        capsys, folder, *COMMON, "--json", "--quiet", "--chat", "--prompt", "17 * 23",
        "--prompt-token-ids", "5,6",
    )  # fmt: skip
    assert code == 0
    message, ids = (json.loads(line)["prompt_token_ids"] for line in out.splitlines())
    text = Tokenizer.load(folder).decode(message, skip_special=False)
    assert text.startswith("]~!b[]~b]system\n")
    assert text.endswith("]~b]user\n17 * 23[e~[\n]~b]ai\n")
    assert ids == [5, 6]


def test_chat_without_a_template_is_refused(capsys, checkpoint, tmp_path):
    for path in checkpoint("tiny").iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).symlink_to(path)
    code, _, err = run(capsys, tmp_path, *COMMON, "--chat", "--prompt", "x")
    assert code != 0
    assert "--chat needs a model with a chat template" in err


def test_one_bad_prompt_fails_alone_and_the_exit_code_says_so(folder, capsys):
    code, out, _ = run(
        capsys, folder, *COMMON, "--json", "--quiet", "--prompt-token-ids", "5,6",
        "--prompt-token-ids", "99999", "--prompt-token-ids", "7",
    )  # fmt: skip
    good, bad, also = map(json.loads, out.splitlines())
    assert code == 1
    assert bad["finish_reason"] == "error"
    assert "from 0 to" in bad["error"]
    assert len(good["token_ids"]) == len(also["token_ids"]) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no prompt"),
        (("--prompt-token-ids", "1,x"), "integers"),
        (("--prompts-file", "nowhere.txt"), "cannot read"),
        (("--prompt", "x", "--temperature", "-1"), "temperature"),
        (("--prompt", "x", "--max-model-len", "0"), "--max-model-len"),
        (("--prompt", "x", "--kv-cache-dtype", "int3"), "--kv-cache-dtype"),
        (("--prompt", "x", "--block-size", "7"), "--block-size 4"),
        (("--prompt", "x", "--tmeperature", "1"), "--temperature"),
        (("--prompt", "x", "-tp", "2"), "one rank"),
        (("--prompt", "x", "--arch", "gfx942"), "--attention-backend cpu"),
    ],
)
def test_what_cannot_be_served_is_refused_before_loading_with_the_way_out(
    folder, capsys, words, said
):
    code, out, err = run(capsys, folder, *words)
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"\x10\x00"), "model.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "config.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(checkpoint, capsys, tmp_path, damage, said):
    from minuet.models.m3.export import make_checkpoint

    broken = make_checkpoint(tmp_path / "m3", preset="tiny")
    damage(broken)
    code, _, err = run(capsys, broken, *COMMON, "--prompt", "x")
    assert code in (1, 2)
    assert said in err
    assert "Traceback" not in err


def test_dummy_weights_need_only_a_config_and_token_ids(folder, capsys):
    words = ("--load-format", "dummy", "--prompt-token-ids", "5,6,7", "--json", "--quiet")
    code, out, _ = run(capsys, folder / "config.json", *words, *COMMON)
    assert code == 0
    written, dummy = run(capsys, folder, *words, *COMMON)[1], out
    assert json.loads(dummy)["token_ids"] == json.loads(written)["token_ids"]
    code, _, err = run(capsys, folder / "config.json", "--prompt-token-ids", "5")
    assert code == 2
    assert "--load-format dummy" in err


def test_the_installed_command_prints_the_plan_to_stderr_and_data_to_stdout(folder):
    words = [sys.executable, "-m", "minuet", "generate", str(folder), "--prompt", "x", "--json"]
    done = subprocess.run([*words, *map(str, COMMON)], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["token_ids"]) == 5
    assert "arch cpu" in done.stderr
