"""``minuet bench serve`` against real servers: a request is answered and timed, or counted."""

import json

from minuet.cli import main
from tests.server.conftest import running
from tests.server.scripted import say

# what readers of vLLM's files look for
VLLM_KEYS = {
    *("date", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(f"{f}_{m}_ms" for f in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl")),
    *(f"{f}_e2el_ms" for f in ("mean", "median", "std", "p99")),
    *("input_lens", "output_lens", "ttfts", "itls", "errors", "start_times"),
}


def bench(server, tmp_path, *flags):
    """Exit code and the saved result."""
    words = ["bench", "serve", "--base-url", server.url, "--disable-tqdm", "--save-detailed"]
    words += ["--result-dir", str(tmp_path), "--result-filename", "r.json", *flags]
    code = main(words)
    return code, json.loads((tmp_path / "r.json").read_text())


def test_every_token_of_random_prompts_is_timed(tiny, tmp_path, capsys):
    flags = ["--num-prompts", "6", "--num-warmups", "1", "--max-concurrency", "3", "--ignore-eos"]
    lengths = ["--random-input-len", "20", "--random-output-len", "6"]
    more = ["--goodput", "ttft:60000", "--metadata", "run=1", "--label", "ci", "--seed", "5"]
    code, result = bench(tiny, tmp_path, *flags, *lengths, *more)
    assert code == 0
    assert set(result) >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["run"]) == (6, 0, "1")
    assert all(10 <= tokens <= 30 for tokens in result["input_lens"])
    assert all(3 <= tokens <= 9 for tokens in result["output_lens"])
    assert len(set(result["input_lens"])) > 1
    for gaps, tokens in zip(result["itls"], result["output_lens"], strict=True):
        assert len(gaps) == tokens - 1
    assert result["request_goodput"] == result["request_throughput"]
    assert result["max_concurrent_requests"] <= 3
    assert result["server"]["config"]["max_num_seqs"] == "16"
    assert result["server"]["after_ready"]["compilations"] == 0
    assert result["server"]["model"]["vocab"] == 640
    assert set(result["environment"]) >= {"commit", "command", "gpus", "python"}
    shown = capsys.readouterr().out
    assert "Successful requests:                     6" in shown
    assert "P80 ITL (ms):" in shown


def test_chat_is_asked_in_text_and_counted_by_the_server(tiny, tmp_path):
    flags = ["--backend", "minuet-chat", "--num-prompts", "3", "--request-rate", "50"]
    lengths = ["--random-input-len", "8", "--random-output-len", "4", "--ignore-eos"]
    code, result = bench(tiny, tmp_path, *flags, *lengths)
    assert (code, result["completed"]) == (0, 3)
    # the template's tokens are the prompt's too
    assert all(tokens > 8 for tokens in result["input_lens"])
    for gaps, tokens in zip(result["itls"], result["output_lens"], strict=True):
        assert len(gaps) == tokens - 1


def test_requests_that_a_full_queue_turns_away_are_counted_and_shown(tiny_folder, tmp_path, capsys):
    data = tmp_path / "slow.jsonl"
    line = {"prompt": say("a", repeat=4, delay_ms=30), "output_tokens": 8}
    data.write_text(f"{json.dumps(line)}\n" * 12)
    flags = ["--max-num-seqs", "2", "--max-num-queued-reqs", "1", "--served-model-name", "m"]
    with running(tiny_folder, *flags, scripted=True) as server:
        asked = ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "12"]
        code, result = bench(server, tmp_path, *asked)
    assert code == 1
    assert result["completed"] >= 2
    assert result["completed"] + result["failed"] == 12
    assert sum(error.startswith("429") for error in result["errors"]) == result["failed"] > 0
    assert "failed: 429 Too Many Requests" in capsys.readouterr().out


def test_an_answer_that_the_server_gives_up_is_a_failure_with_its_reason(scripted, tmp_path):
    data = tmp_path / "bad.jsonl"
    lines = [
        {"prompt": say("abc abc abc", do="nan", at=2), "output_tokens": 8},
        {"prompt": say("abc"), "output_tokens": 8},
    ]
    data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked = ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "2"]
    code, result = bench(scripted, tmp_path, *asked, "--max-concurrency", "1")
    assert (code, result["completed"], result["failed"]) == (1, 1, 1)
    assert "non-finite" in result["errors"][0]
    assert result["errors"][1] == ""
    scripted.until_idle()


def test_a_warm_up_that_fails_ends_the_run_with_the_reason(scripted, tmp_path, capsys):
    data = tmp_path / "bad.jsonl"
    data.write_text(f"{json.dumps({'prompt': say('abc', do='nan'), 'output_tokens': 2})}\n" * 2)
    words = ["--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", "1"]
    code = main(["bench", "serve", "--base-url", scripted.url, "--num-warmups", "1", *words])
    assert code == 2
    assert "warm-up failed: 1 failed: " in capsys.readouterr().err


def test_no_server_is_said_in_one_line(capsys):
    words = ["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]
    assert main(["bench", "serve", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no server at http://127.0.0.1:9" in line
