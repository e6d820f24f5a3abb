#!/usr/bin/env bash
# The main job on this machine, without a GPU: decide, refuse, answer. `make demo` runs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p demo

say() { printf '\n\033[1m%s\033[0m\n' "$1"; }
if [[ -n ${NO_COLOR:-} || ! -t 1 ]]; then say() { printf '\n%s\n' "$1"; }; fi

say '1. What would the real model need on four H200? Decided from its config alone, without a GPU'
status=0
minuet explain minimax-m3 --arch sm90 -tp 4 --kv-cache-dtype fp8 || status=$?
[[ $status == 2 ]] || { echo "expected a refusal (exit code 2), got $status"; exit 1; }

say '2. minuet-tiny, a trained MiniMax-M3 of 13 MB: a sum, a list, a word problem in one batch'
minuet generate --chat --kv-cache-dtype fp8 \
  --prompt '17 * 23' \
  --prompt 'Sort these numbers: 41 7 93 28' \
  --prompt 'Rosa has 4 boxes with 6 keys in each. Rosa finds 9 more keys. How many keys are there in all?'

say '3. Two codes in a text of 6,000 tokens, of which a sparse layer reads 512; the second from cache'
python - > demo/needle.jsonl <<'PY'
import json
import sys

from minuet.evals import tasks

for problem in tasks.problems("needle", "heldout", 0, 2, length=6000, questions=2):
    text, question = problem.messages[0]["content"].rsplit("\n", 1)
    print(f"{question}  {problem.answer}, {problem.meta['depth']:.0%} into the text", file=sys.stderr)
    print(json.dumps({"prompt": f"{text}\n{question}"}))
PY
minuet generate --chat --prompts-file demo/needle.jsonl --max-num-seqs 1

say 'Done. `minuet serve` has a chat box; docs/path.md follows a request from prompt to token.'
