"""What the model is trained on: the chat template's text, held apart from what it is tested on."""

import functools

import numpy as np
import pytest
from training.data import SHORT, Rows, Step, make

from minuet.evals import tasks
from training import tokenizer as training_tokenizer


@functools.cache
def tokenizer():
    return training_tokenizer.train()


def rows(seed="0"):
    made = Rows(tokenizer(), "train")
    made.seed(seed)
    return made


def test_remembered_pieces_give_the_tokenizers_ids():
    made = rows()
    decoded = 0
    for number in range(60):
        ids, kinds = made.short() if number % 4 else made.long(640)
        text = tokenizer().decode(ids, skip_special_tokens=False)
        assert ids == tokenizer().encode(text, add_special_tokens=False).ids
        assert len(kinds) == len(ids)
        decoded += len(ids)
    assert decoded > 10_000


def test_rows_are_a_function_of_the_seed():
    step = Step(4, 2, 512)
    one, again, other = (make(rows(seed), step) for seed in ("1", "1", "2"))
    for a, b, c in zip(one, again, other, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.kinds, b.kinds)
        assert not np.array_equal(a.tokens, c.tokens)
    assert one[0].tokens.shape == (4, SHORT)
    assert one[1].tokens.shape == (2, 512)


@pytest.mark.parametrize("task", list(tasks.TASKS))
def test_what_counts_as_the_answer_is_the_assistants_turn(task):
    problem = next(tasks.problems(task, "train", 0, 1))
    ids, kinds = rows().conversation([*problem.messages, problem.reply], tools=problem.tools)
    said = [token for token, kind in zip(ids, kinds, strict=True) if kind == 2]
    text = tokenizer().decode(said, skip_special_tokens=False)
    thought = problem.reply.get("reasoning_content")
    begin = f"<mm:think>{thought}</mm:think>" if thought else "</mm:think>"
    assert text.startswith(begin + problem.reply["content"])
    assert text.endswith("[e~[")
    assert kinds[-len(said) - 1 :] == [2] * len(said) + [1]  # a newline ends the turn


def test_long_rows_fit_and_ask_for_facts_that_are_there():
    made = rows()
    for length in (512, 1024, 4096):
        ids, kinds = made.long(length)
        assert 0.9 * length < len(ids) <= length + 16
        answers = tokenizer().decode([i for i, k in zip(ids, kinds, strict=True) if k == 2])
        assert answers
