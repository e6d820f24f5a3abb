"""Models, tokens, health, metrics, the plan: what clients, dashboards and operators ask."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.scripted import say
from tests.server.test_completions import complete

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_models(tiny):
    models = tiny.get("/v1/models").json()
    assert [m["id"] for m in models["data"]] == ["tiny", "alias"]
    assert set(models["data"][0]) >= {"id", "object", "created", "owned_by", "root"}
    assert tiny.get("/v1/models/alias").json()["max_model_len"] == 2047 * 4


def test_tokens_there_and_back(tiny):
    text = "naïve café 🙂 日本\n"
    found = tiny.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert tiny.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == text
    wrong = tiny.post("/detokenize", {"tokens": [10**6]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
    assert tiny.post("/tokenize", {}).status_code == 400
    info = tiny.get("/tokenizer_info").json()
    assert info["eos_token"] == "[e~["
    assert "messages" in info["chat_template"]


def test_the_template_is_rendered_as_transformers_does(tiny, tiny_folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "é & <b>"}]
    ours = tiny.post("/tokenize", {"messages": messages, "tools": [tool]}).json()["tokens"]
    theirs = tokenizer.apply_chat_template(messages, tools=[tool], add_generation_prompt=True)
    assert ours == list(theirs["input_ids"])


def test_the_plan_as_served(tiny):
    plan = tiny.get("/explain").json()
    assert plan["servable"]
    assert {call["kernel"] for call in plan["calls"]} >= {"cpu.attend", "cpu.select"}
    assert plan["memory"]["num_pages"] == 2048
    assert plan["timings_s"]["load"] > 0


def test_metrics_count_what_happened(tiny):
    before = {
        name: tiny.metric(name)
        for name in ("minuet:generation_tokens_total", "minuet:prompt_tokens_total")
    }
    answer = complete(tiny, max_tokens=7, ignore_eos=True, n=2)["usage"]
    tiny.until_idle()
    drawn = tiny.metric("minuet:generation_tokens_total") - before["minuet:generation_tokens_total"]
    assert drawn == answer["completion_tokens"] == 14
    prompt = tiny.metric("minuet:prompt_tokens_total") - before["minuet:prompt_tokens_total"]
    assert prompt == 2 * answer["prompt_tokens"]
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert tiny.metric(f"minuet:{name}_count") >= 2
    assert tiny.metric("minuet:request_success_total", finished_reason="length") >= 2
    assert tiny.metric("minuet:engine_up") == 1
    assert tiny.metric("minuet:compilations_after_ready_total") == 0
    assert tiny.metric("minuet:memory_growth_after_ready_bytes") == 0
    assert tiny.metric("minuet:kv_cache_bytes") > 0
    assert tiny.metric("minuet:achieved_bandwidth_bytes_per_second") > 0
    labels = {"layer_kind": "sparse", "op": "attend", "backend": "cpu", "arch": "cpu"}
    assert tiny.metric("minuet:attention_backend_info", **labels) == 1
    assert tiny.metric("minuet:cache_config_info", block_size="4") == 1


VLLM_SUFFIXES = {
    *(
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
    ),
    *(
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
    ),
    *(
        "request_success",
        "num_preemptions",
        "time_to_first_token_seconds",
    ),
    *(
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
    ),
    *(
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ),
    *(
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
    ),
    *(
        "request_generation_tokens",
        "iteration_tokens_total",
        "cache_config",
    ),
}


def test_metrics_are_well_formed_and_all_on_their_page(tiny):
    complete(tiny, max_tokens=1)
    families = list(text_string_to_metric_families(tiny.get("/metrics").text))
    names = {f.name.removeprefix("minuet:") for f in families if f.name.startswith("minuet:")}
    names = {name for name in names if not name.endswith("_created")}
    assert VLLM_SUFFIXES - {"cache_config"} <= names
    told = set(re.findall(r"`minuet:([a-z0-9_]+)`", METRICS_PAGE.read_text(encoding="utf-8")))
    assert {name.removesuffix("_total").removesuffix("_info") for name in names} == {
        name.removesuffix("_total").removesuffix("_info") for name in told
    }


def test_the_server_never_imports_torch():
    code = "import sys, minuet.server.app, minuet.cli.serve; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.strip() == "False"


def test_stats_for_the_page(scripted):
    complete(scripted, prompt=say("abc"))
    stats = scripted.get("/stats").json()
    assert stats["latency_s"]["ttft"]["p50"] > 0
    assert stats["pages"]["total"] > 0
