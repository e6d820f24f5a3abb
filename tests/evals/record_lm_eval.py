"""Records what lm-evaluation-harness makes of GSM8K prompts and outputs; run once, by hand.

    python tests/evals/record_lm_eval.py > tests/evals/gsm8k_lm_eval.json

with a Python that has ``lm_eval`` (0.4.13 wrote the committed file) and nothing of ours: the judge
must not be made of the judged. The questions are our own, in the public format; the task is the
harness's own ``gsm8k.yaml``, with the data set replaced.
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

NUMBERS = (3, 14, 1234, -5, 72, 1000000, 8, 250)
DOCS = [
    {
        "question": f"{n} pears, and {i} more?",
        "answer": f"{n} + {i} = <<{n}+{i}={n + i}>>{n + i:,}.\n#### {n + i:,}",
    }
    for i, n in enumerate(NUMBERS)
]
# (output, the answer of the data set)
OUTPUTS = [
    ("There are 9 + 9 = 18 pears.\n#### 18", "... \n#### 18"),
    (" 18", "#### 18"),
    ("#### 18.", "#### 18"),
    ("#### 18.0", "#### 18"),
    ("#### 1,234", "#### 1,234"),
    ("#### 1234", "#### 1,234"),
    ("1,234", "#### 1234"),
    ("#### $1,234", "#### 1234"),
    ("The total is $1,234.", "#### 1234"),
    ("The total is $1,234.00", "#### 1234"),
    ("#### -5", "#### -5"),
    ("It fell by 5, to -5", "#### -5"),
    ("#### - 5", "#### -5"),
    ("10-5", "#### -5"),
    ("#### 3 and then #### 4", "#### 3"),
    ("#### 3 and then #### 4", "#### 4"),
    ("First 3, then 4, at last 7 pears", "#### 7"),
    ("The answer is 7", "#### 7"),
    ("The answer is 7.", "#### 7"),
    ("The answer is 70.", "#### 70"),
    ("seven", "#### 7"),
    ("", "#### 7"),
    ("####", "#### 7"),
    ("####7", "#### 7"),
    ("### 7", "#### 7"),
    ("####  7", "#### 7"),
    ("#### 7\n\nQ: another? #### 9", "#### 7"),
    ("#### ,", "#### 7"),
    ("#### .", "#### 7"),
    ("He paid $5.50, so #### 5.5", "#### 5.50"),
    ("#### 5.50", "#### 5.50"),
    ("\\boxed{42}", "#### 42"),
    ("42%", "#### 42"),
    ("x = 42...", "#### 42"),
    ("in 2,3,4 steps", "#### 4"),
    ("$", "#### 7"),
    ("$$ ..", "#### 7"),
    ("#### 42 apples", "#### 42"),
    ("#### ABC", "#### abc"),
    ("answer: 4 2", "#### 42"),
    ("#### 007", "#### 7"),
    ("\u0664\u0662", "#### 42"),
    ("#### \uff17", "#### 7"),
    ("#### 12\n#### 13", "#### 12"),
    ("1e3", "#### 1000"),
    ("3/4", "#### 4"),
]


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    for split, docs in (("train", DOCS[:6]), ("test", DOCS[6:])):
        lines = "".join(json.dumps(doc) + "\n" for doc in docs)
        (folder / f"{split}.jsonl").write_text(lines)
    source = Path(lm_eval.tasks.__file__).parent / "gsm8k/gsm8k.yaml"
    found = {"lm_eval": version("lm_eval"), "docs": DOCS}
    both = {"train": "train.jsonl", "test": "test.jsonl"}
    own = "training_split: null\nfewshot_split: test\n"
    found["prompts"] = {
        "from_train": prompts(folder, source, both, ""),
        "from_test": prompts(folder, source, {"test": "train.jsonl"}, own),
        "chat": [json.loads(text) for text in prompts(folder, source, both, "", chat=True)],
    }
    found["outputs"] = grade(folder, source)
    json.dump(found, sys.stdout, indent=1, ensure_ascii=True)
    print()


def load(folder: Path, source: Path, files: dict[str, str], more: str):
    data = {split: str(folder / name) for split, name in files.items()}
    name = "_".join(["minuet", *files])
    lines = [
        f"include: {source}",
        f"task: {name}",
        "dataset_path: json",
        "dataset_name: null",
        f"dataset_kwargs: {{data_files: {json.dumps(data)}}}",
    ]
    (folder / f"{name}.yaml").write_text("\n".join(lines) + "\n" + more)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = manager.load([name])
    return found["tasks"][name] if "tasks" in found else found[name]


def prompts(
    folder: Path, source: Path, files: dict[str, str], more: str, *, chat: bool = False
) -> list[str]:
    task = load(folder, source, files, more)
    task.set_fewshot_seed(seed=1234)  # the default of `lm_eval`
    task.build_all_requests(
        rank=0,
        world_size=1,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
        chat_template=(lambda messages, **_: json.dumps(messages)) if chat else None,
    )
    return [instance.args[0] for instance in task.instances]


def grade(folder: Path, source: Path) -> list[dict]:
    task = load(folder, source, {"train": "train.jsonl", "test": "test.jsonl"}, "")
    graded = []
    for number, (output, answer) in enumerate(OUTPUTS):
        doc = {"question": "?", "answer": answer}
        instance = Instance("generate_until", doc, ("", {}), 0, task_name="t", doc_id=number)
        instance.resps = [output]
        task._instances = [instance]
        task.apply_filters()
        item = {"output": output, "answer": answer}
        for name in ("strict-match", "flexible-extract"):
            extracted = instance.filtered_resps[name]
            score = task.process_results(doc, [extracted])["exact_match"]
            item[name] = {"extracted": extracted, "correct": bool(score)}
        graded.append(item)
    return graded


if __name__ == "__main__":
    main()
