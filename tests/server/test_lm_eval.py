"""lm-evaluation-harness, unchanged: log-likelihoods and generation, with our tokenizer.

It is not among the development tools, as it brings a hundred packages: `pip install 'lm_eval[api]'`
anywhere on the PATH makes these tests run.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

LM_EVAL = shutil.which("lm_eval")
pytestmark = [
    pytest.mark.skipif(not LM_EVAL, reason="needs lm_eval on the PATH"),
    pytest.mark.timeout(600),
]

CHOICE = """
task: minuet_choice
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """
task: minuet_generate
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    docs = [
        {"question": f"The bear number {i} is", "choices": ["brown", "a fish"], "label": i % 2}
        for i in range(8)
    ]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "choice.yaml").write_text(CHOICE % data)
    (folder / "generate.yaml").write_text(GENERATE % data)
    return folder


def evaluate(tasks, model, task, arguments, *more):
    output = Path(tempfile.mkdtemp(dir=tasks))
    command = [LM_EVAL, "--model", model, "--model_args", arguments, "--tasks", task]
    command += ["--include_path", str(tasks), "--output_path", str(output), "--log_samples", *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tasks / "cache")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    lines = samples.read_text().splitlines()
    return json.loads(results.read_text())["results"][task], [json.loads(line) for line in lines]


@pytest.mark.parametrize("tokenized", ["True", "False"])
def test_log_likelihoods_are_those_of_the_model(tiny, tasks, tokenized):
    url = f"{tiny.url}/v1/completions"
    arguments = f"model=tiny,base_url={url},tokenizer_backend=remote,num_concurrent=4"
    arguments += f",tokenized_requests={tokenized},max_length=512"
    results, samples = evaluate(tasks, "local-completions", "minuet_choice", arguments)
    assert "acc,none" in results
    for sample in samples[:2]:
        pairs = zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True)
        for choice, (value, _) in pairs:
            text = sample["doc"]["question"]  # the harness puts a space between the two
            body = {"prompt": f"{text} {choice}", "max_tokens": 0, "echo": True, "logprobs": 1}
            report = tiny.post("/v1/completions", body).json()["choices"][0]["logprobs"]
            begun = len(tiny.post("/tokenize", {"prompt": text}).json()["tokens"])
            assert float(value) == pytest.approx(sum(report["token_logprobs"][begun:]), rel=1e-3)


def test_generation_through_chat(tiny, tasks):
    url = f"{tiny.url}/v1/chat/completions"
    arguments = f"model=tiny,base_url={url},num_concurrent=4"
    results, samples = evaluate(
        tasks, "local-chat-completions", "minuet_generate", arguments, "--apply_chat_template"
    )
    assert "exact_match,none" in results
    assert len(samples) == 8
