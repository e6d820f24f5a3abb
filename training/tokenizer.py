"""minuet-tiny's tokenizer: byte-level BPE over the tasks' own wording, every digit a token."""

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from minuet.evals import tasks
from minuet.models.m3.sample_tokenizer import MARKERS, add_markers, chat_template
from minuet.server.template import Template

VOCAB = 1280

_PER_TASK = 400
_OPTIONS = {"needle": {"length": 1024, "questions": 4}}


def train() -> Tokenizer:
    """Train it, in a second; the same everywhere. Its last ids are M3's markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = re.compile("|".join(re.escape(text) for text, _ in MARKERS))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # what a marker parts never becomes one token
    parts = (part for text in _texts() for part in markers.split(text))
    tokenizer.train_from_iterator(parts, trainer)
    return add_markers(tokenizer)


def _texts() -> list[str]:
    template = Template(chat_template(), {}, [], lambda text: [])
    return [
        template.render(
            [*problem.messages, problem.reply], tools=problem.tools, add_generation_prompt=False
        ).text
        for task in tasks.TASKS
        for problem in tasks.problems(task, "train", 0, _PER_TASK, **_OPTIONS.get(task, {}))
    ]
