#!/usr/bin/env bash
# The main job on this machine, without a GPU: decide, refuse, generate. `make demo` runs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkpoint=demo/m3-small

say() { printf '\n\033[1m%s\033[0m\n' "$1"; }
if [[ -n ${NO_COLOR:-} || ! -t 1 ]]; then say() { printf '\n%s\n' "$1"; }; fi

say '1. A small MiniMax-M3 with random weights: real layout, real tokenizer, meaningless answers'
if [[ ! -f $checkpoint/config.json ]]; then
  python tools/make_checkpoint.py "$checkpoint" --preset small
fi

say '2. What would the real model need on four H200? Decided from its config alone, without a GPU'
status=0
minuet explain minimax-m3 --arch sm90 -tp 4 --kv-cache-dtype fp8 || status=$?
[[ $status == 2 ]] || { echo "expected a refusal (exit code 2), got $status"; exit 1; }

say '3. Four requests at once: continuous batching, paged cache, sparse attention, FP8 KV'
minuet generate "$checkpoint" --kv-cache-dtype fp8 --max-tokens 24 --temperature 0.8 \
  --prompt 'Once upon a time' --prompt 'The quick brown fox' \
  --prompt 'def main():' --prompt 'One, two, three'

say '4. A long prompt twice: block selection starts beyond 2,048 tokens, the second time is cached'
python - > demo/long.jsonl <<'PY'
import json
line = "The needle is in the haystack, and the haystack is very large. "
for _ in range(2):
    print(json.dumps({"prompt": line * 95, "max_tokens": 8, "temperature": 0.0}))
PY
minuet generate "$checkpoint" --prompts-file demo/long.jsonl --max-num-batched-tokens 1024

say 'Done. `minuet --help` lists the commands; docs/path.md follows a request from prompt to token.'
