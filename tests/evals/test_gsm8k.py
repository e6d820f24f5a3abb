"""GSM8K's prompts and grades equal those that lm-evaluation-harness gave to the same documents."""

import json
from pathlib import Path

import pytest

from minuet.errors import ConfigError
from minuet.evals import gsm8k

RECORD = json.loads((Path(__file__).parent / "gsm8k_lm_eval.json").read_text(encoding="utf-8"))
DOCUMENTS = [gsm8k.Document(**doc) for doc in RECORD["docs"]]
TRAIN, TEST = DOCUMENTS[:6], DOCUMENTS[6:]
EXTRACT = {"strict-match": gsm8k.strict_match, "flexible-extract": gsm8k.flexible_extract}


@pytest.mark.parametrize("item", RECORD["outputs"], ids=lambda item: repr(item["output"])[:24])
def test_extraction_and_grade_agree_with_lm_eval(item):
    grades = gsm8k.grade(item["output"], item["answer"])
    for name, extract in EXTRACT.items():
        assert extract(item["output"]) == item[name]["extracted"]
        assert grades[name] is item[name]["correct"]


def test_the_record_holds_every_kind_of_disagreement():
    """Else agreeing with it would say little."""
    grades = {tuple(item[name]["correct"] for name in EXTRACT) for item in RECORD["outputs"]}
    assert grades == {(True, True), (True, False), (False, True), (False, False)}


def test_prompts_with_examples_of_another_file_are_lm_evals():
    shown = gsm8k.examples(TEST, TRAIN)
    built = [gsm8k.prompt(doc, s) for doc, s in zip(TEST, shown, strict=True)]
    assert built == RECORD["prompts"]["from_train"]


def test_prompts_with_examples_of_the_same_file_are_lm_evals():
    shown = gsm8k.examples(TRAIN, None)
    built = [gsm8k.prompt(doc, s) for doc, s in zip(TRAIN, shown, strict=True)]
    assert built == RECORD["prompts"]["from_test"]


def test_chats_are_lm_evals():
    shown = gsm8k.examples(TEST, TRAIN)
    built = [gsm8k.messages(doc, s) for doc, s in zip(TEST, shown, strict=True)]
    assert built == RECORD["prompts"]["chat"]


def test_a_question_is_never_its_own_example():
    twice = [*TRAIN, *TRAIN]
    for document, shown in zip(twice, gsm8k.examples(twice, None), strict=True):
        assert len(shown) == gsm8k.FEWSHOT
        assert document not in shown


def test_no_examples_ask_the_bare_question():
    assert gsm8k.examples(TEST, TRAIN, 0) == [[], []]
    assert gsm8k.prompt(TEST[0], []) == f"Question: {TEST[0].question}\nAnswer:"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no questions"),
        ("{}", "`question`"),
        ("[1]", ":1"),
        ('{"question": "a", "answer": 3}', "texts"),
        ('{"question": "a", "answer": "b"}\nnonsense', ":2"),
    ],
)
def test_a_file_in_another_format_is_refused_with_its_line(tmp_path, text, named):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        gsm8k.read(path)


def test_too_few_documents_for_the_examples_are_refused():
    with pytest.raises(ConfigError, match="--fewshot-data"):
        gsm8k.examples(TEST, TRAIN[:4])
    with pytest.raises(ConfigError, match="at least 6"):
        gsm8k.examples(TRAIN[:5], None)
