"""Training rows from the tasks, made by worker processes ahead of the GPU.

What a step trains on is a function of the seed, the number of workers and the step's number, not of
timing: worker w of n makes the batches of steps w, w + n, ... in order.
"""

import multiprocessing
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from minuet.evals import tasks
from minuet.evals.tasks.base import Problem, Split
from minuet.models.m3.sample_tokenizer import EOS, MARKERS, PAD, TURN, chat_template
from minuet.server.template import Template

SHORT = 448
"""Tokens of a row of short conversations."""

_ANSWER, _TEXT, _NOTHING = 2, 1, 0
"""How a target counts: part of an answer, of the rest, or not at all."""

# What the tokenizer cuts a text into before BPE: digits one by one, words and marks with the space
# before them, other white space together; markers are cut out first.
_PIECES = re.compile(r"\d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?=\d)|\s+(?!\S)|\s+")
_MARKERS = re.compile("(" + "|".join(re.escape(text) for text, _ in MARKERS) + ")")

_TASK_SHARES = {"arithmetic": 0.6, "wordproblems": 0.2, "lists": 0.15, "talk": 0.05}
# products and differences take longest to learn
_OPTIONS = {"arithmetic": {"operators": ("*", "*", "*", "-", "-", "+", "+++")}}
_TALK = (
    ("Hello", "Hello. I do sums, sort lists, find codes in long texts and call tools."),
    ("Hi", "Hello. I do sums, sort lists, find codes in long texts and call tools."),
    ("Who are you?", "I am minuet-tiny, a very small MiniMax-M3 that comes with Minuet."),
    ("What are you?", "I am minuet-tiny, a very small MiniMax-M3 that comes with Minuet."),
    ("What can you do?", "I do sums, sort lists, find codes in long texts and call tools."),
    ("Thank you", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Good morning", "Good morning. What is the sum?"),
    ("Bye", "Goodbye."),
)


@dataclass(frozen=True)
class Batch:
    """Rows of one length.

    Attributes:
        tokens: [B, T] int16.
        kinds: [B, T] uint8: how each token counts as a target; see ``weights``.
    """

    tokens: np.ndarray
    kinds: np.ndarray

    def weights(self, text: float) -> np.ndarray:
        """[B, T] float32: 1 for answers, ``text`` for the rest, 0 for padding."""
        return np.array([0.0, text, 1.0], dtype=np.float32)[self.kinds]


class Rows:
    """Makes rows of token ids.

    Args:
        tokenizer: of the model.
        split: side of the line of every problem.
    """

    def __init__(self, tokenizer: Tokenizer, split: Split):
        self._tokenizer, self._split = tokenizer, split
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._pad, self._turn, self._end = vocab[PAD], vocab[TURN], vocab[EOS]
        self._ai = vocab["ai"]
        self._template = Template(chat_template(), {}, [], self.encode)
        self._known: dict[str, list[int]] = {}
        self.seed("")

    def seed(self, seed: str) -> None:
        """Begin again: rows are a function of the seed and their number since."""
        self._rng = random.Random(seed)
        self._sources: dict[str, Iterator[Problem]] = {
            task: tasks.problems(
                task, self._split, self._rng.getrandbits(48), 10**9, **_OPTIONS.get(task, {})
            )
            for task in tasks.TASKS
            if task != "needle"
        }

    def encode(self, text: str) -> list[int]:
        """Token ids of a text: those of its pieces, each tokenised once and remembered.

        Some ten times faster than the tokenizer on a text, and equal to it (``tests/training``).
        """
        ids: list[int] = []
        known = self._known
        for number, part in enumerate(_MARKERS.split(text)):
            for piece in [part] if number % 2 else _PIECES.findall(part):
                if piece not in known:
                    known[piece] = self._tokenizer.encode(piece, add_special_tokens=False).ids
                ids += known[piece]
        return ids

    def batch(self, rows: Sequence[tuple[list[int], list[int]]], length: int) -> Batch:
        """Rows padded or cut to one length."""
        tokens = np.full((len(rows), length), self._pad, dtype=np.int16)
        kinds = np.zeros((len(rows), length), dtype=np.uint8)
        for number, (ids, how) in enumerate(rows):
            size = min(len(ids), length)
            tokens[number, :size], kinds[number, :size] = ids[:size], how[:size]
        return Batch(tokens, kinds)

    # --- one row ----------------------------------------------------------

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        mode: str = "adaptive",
        untaught: int = 0,
    ) -> tuple[list[int], list[int]]:
        """Token ids and kinds of a conversation; its assistant turns are answers.

        Args:
            messages: with the assistant's.
            tools: on offer.
            mode: the template's ``thinking_mode``.
            untaught: assistant turns at the beginning that are only read.
        """
        ids = self._template.render(
            messages, tools=tools, add_generation_prompt=False, kwargs={"thinking_mode": mode}
        ).token_ids
        kinds = [_TEXT] * len(ids)
        for at, token in enumerate(ids):
            if token == self._turn and ids[at + 1] == self._ai:
                start = at + 3  # after turn marker, ``ai``, newline
                end = ids.index(self._end, start) + 1
                kinds[start:end] = [_NOTHING if untaught > 0 else _ANSWER] * (end - start)
                untaught -= 1
        return ids, kinds

    def short(self) -> tuple[list[int], list[int]]:
        """A row of short conversations, of one of several kinds."""
        draw = self._rng.random()
        if draw < 0.2:
            return self._tools_row()
        if draw < 0.26:
            return self._few_shots()
        return self._chat_row()

    def _chat_row(self) -> tuple[list[int], list[int]]:
        rng = self._rng
        mode = rng.choices(("adaptive", "enabled", "disabled"), (0.8, 0.1, 0.1))[0]
        # a client gives earlier answers back without their reasoning: these are only read
        forgetful = rng.random() < 0.25
        turns = [self._turn_of(mode) for _ in range(rng.choice((1, 2, 3, 4, 5)))]
        if forgetful:
            turns = [
                (asked, {k: v for k, v in reply.items() if k != "reasoning_content"})
                for asked, reply in turns[:-1]
            ] + turns[-1:]
        messages = [message for turn in turns for message in turn]
        return self.conversation(messages, mode=mode, untaught=len(turns) - 1 if forgetful else 0)

    def _turn_of(self, mode: str) -> tuple[Mapping[str, Any], dict[str, Any]]:
        task = self._rng.choices(list(_TASK_SHARES), list(_TASK_SHARES.values()))[0]
        if task == "talk":
            asked, said = self._rng.choice(_TALK)
            question: Mapping[str, Any] = {"role": "user", "content": asked}
            reply = {"role": "assistant", "content": said}
        else:
            problem = next(self._sources[task])
            question, reply = problem.messages[0], dict(problem.reply)
        if mode == "disabled":
            reply.pop("reasoning_content", None)
        elif mode == "enabled":
            reply.setdefault("reasoning_content", "This needs no thought.")
        return question, reply

    def _tools_row(self) -> tuple[list[int], list[int]]:
        problem = next(self._sources["toolcalls"])
        messages = [*problem.messages, problem.reply]
        if self._rng.random() < 0.2:  # tools on offer, none needed
            messages = list(self._turn_of("adaptive"))
        return self.conversation(messages, tools=problem.tools)

    def _few_shots(self) -> tuple[list[int], list[int]]:
        """Questions and answers without a template, as a few-shot evaluation puts them."""
        shots = [next(self._sources["wordproblems"]) for _ in range(6)]
        text = "\n\n".join(
            f"Question: {p.messages[0]['content']}\nAnswer: {p.reply['content']}" for p in shots
        )
        ids = self.encode(text + "\n\n")
        return ids, [_ANSWER] * len(ids)

    def long(self, length: int) -> tuple[list[int], list[int]]:
        """A long text, and questions about it in turn; about ``length`` tokens."""
        rng = self._rng
        questions = 1 if rng.random() < 0.1 else max(2, length // rng.choice((80, 128, 200)))
        room = int((length - 80 - 26 * questions) / 1.05)
        facts = max(questions, room // rng.choice((40, 64, 128)))
        facts = min(facts, room // 24, 1000)
        stack = tasks.haystack(self._split, rng.getrandbits(48), room, facts=facts)
        asked = rng.sample(stack.needles, min(questions, facts))
        problems = [stack.problem(needle) for needle in asked]
        messages: list[Mapping[str, Any]] = [problems[0].messages[0], problems[0].reply]
        for problem in problems[1:]:
            question = problem.messages[0]["content"].rpartition("\n\n")[2]
            messages += [{"role": "user", "content": question}, problem.reply]
        mode = "disabled" if rng.random() < 0.1 else "adaptive"
        return self.conversation(messages, mode=mode)


# --- ahead of the GPU ----------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What a step trains on: batches of short rows and of long ones.

    Attributes:
        short_rows: rows of :data:`SHORT` tokens.
        long_rows: rows of long texts; 0: none.
        length: of those, in tokens.
    """

    short_rows: int
    long_rows: int
    length: int


def make(rows: Rows, step: Step) -> list[Batch]:
    """The batches of a step."""
    batches = [rows.batch([rows.short() for _ in range(step.short_rows)], SHORT)]
    if step.long_rows:
        long = [rows.long(step.length) for _ in range(step.long_rows)]
        batches.append(rows.batch(long, step.length))
    return batches


class Feed:
    """Batches of every step in order, made by worker processes.

    Args:
        tokenizer: of the model.
        steps: what each step trains on.
        seed: of everything.
        workers: processes.
    """

    def __init__(self, tokenizer: Tokenizer, steps: Sequence[Step], seed: int, workers: int):
        context = multiprocessing.get_context("spawn")
        self._queues = [context.Queue(maxsize=6) for _ in range(workers)]
        self._workers = [
            context.Process(
                target=_work,
                args=(tokenizer.to_str(), steps[w::workers], f"{seed}/{w}", queue),
                daemon=True,
            )
            for w, queue in enumerate(self._queues)
        ]
        for worker in self._workers:
            worker.start()
        self._count = len(steps)

    def __iter__(self) -> Iterator[list[Batch]]:
        for number in range(self._count):
            yield self._queues[number % len(self._queues)].get(timeout=120)
        for worker in self._workers:
            worker.join(timeout=10)


def _work(tokenizer: str, steps: Sequence[Step], seed: str, queue: Any) -> None:
    rows = Rows(Tokenizer.from_str(tokenizer), "train")
    for number, step in enumerate(steps):
        rows.seed(f"{seed}/{number}")
        queue.put(make(rows, step))
