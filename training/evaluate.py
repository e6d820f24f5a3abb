"""Accuracy on held-out problems, of a model in training or of a checkpoint folder.

    python -m training.evaluate src/minuet/models/bundled/minuet-tiny --out accuracy.json

A problem counts if every token of the whole reply, its working included, is the most likely one
given those before it: what greedy decoding writes is then that reply. The served model is scored by
``minuet eval``; this is its fast counterpart for a GPU that has just trained it.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from minuet.dtypes import DType
from minuet.evals import tasks
from minuet.models.m3.spec import parse
from minuet.models.m3.weights import load_weights
from training.data import Rows
from training.model import Model, Pass

DISABLED = "without thinking"

_AT_ONCE = 65536  # tokens of one forward pass


class HeldOut:
    """Held-out problems, drawn once and asked often.

    A case is named by its task and an option: ``arithmetic *``, ``needle 4096``, ``lists``; with
    :data:`DISABLED` behind it, the reply is the bare answer.

    Args:
        tokenizer: of the model.
        count: problems per case.
    """

    def __init__(self, tokenizer: Tokenizer, count: int):
        self._rows, self._count = Rows(tokenizer, "heldout"), count
        self._drawn: dict[str, list[tuple[list[int], list[int]]]] = {}

    def evaluate(self, model: Model, lengths: Sequence[int], *, quick: bool = False) -> Any:
        """Shares of right replies.

        Needles are looked for with the real selection and with full attention; once also with only
        the own block selected, and with blocks selected by chance.

        Args:
            model: in any state.
            lengths: of needle texts, rising.
            quick: leave out all but the two shortest lengths, and the broken selections.
        """
        sparse = Pass(model.spec.top_blocks)
        others = [task for task in tasks.TASKS if task not in ("arithmetic", "needle")]
        found: dict[str, float] = {}
        for name in [*(f"arithmetic {kind}" for kind in tasks.arithmetic.OPERATORS), *others]:
            found[name] = self.accuracy(model, name, sparse)
        for length in lengths[: 2 if quick else None]:
            name = f"needle {length}"
            found[name] = self.accuracy(model, name, sparse)
            found[f"{name} full attention"] = self.accuracy(model, name, Pass())
        if not quick:
            name = f"needle {lengths[min(1, len(lengths) - 1)]}"
            for label, broken in (
                ("own block only", replace(sparse, top_blocks=1)),
                ("blocks by chance", replace(sparse, shuffle_keys=True)),
            ):
                found[f"{name} {label}"] = self.accuracy(model, name, broken)
        return found

    @torch.no_grad()
    def accuracy(self, model: Model, name: str, how: Pass) -> float:
        """Share of the problems of one case whose whole reply is right."""
        if name not in self._drawn:
            self._drawn[name] = list(self._draw(name))
        conversations, device, right = self._drawn[name], model.weights.embed.device, 0
        longest = max(len(ids) for ids, _ in conversations)
        length = -(-longest // 128) * 128
        at_once = max(1, _AT_ONCE // length)
        for start in range(0, len(conversations), at_once):
            batch = self._rows.batch(conversations[start : start + at_once], length)
            tokens = torch.from_numpy(batch.tokens).to(device).long()
            answers = torch.from_numpy(batch.weights(0.0)).to(device)[:, 1:] > 0
            hidden, _ = model(tokens, how)
            said = model.logits(hidden[:, :-1][answers]).argmax(-1)
            missed = (said != tokens[:, 1:][answers]).float()
            row = answers.nonzero()[:, 0]
            wrong = torch.zeros(len(tokens), device=device).index_add_(0, row, missed)
            right += int((wrong == 0).sum())
        return right / len(conversations)

    def _draw(self, name: str) -> Iterator[tuple[list[int], list[int]]]:
        thinks = not name.endswith(DISABLED)
        task, _, option = name.removesuffix(DISABLED).strip().partition(" ")
        options: dict[str, Any] = {}
        if task == "arithmetic":
            options = {"operators": (option,)}
        if task == "needle":
            options = {"length": int(option)}
        for problem in tasks.problems(task, "heldout", 0, self._count, **options):
            reply = dict(problem.reply)
            if not thinks:
                reply.pop("reasoning_content", None)
            yield self._rows.conversation(
                [*problem.messages, reply],
                tools=problem.tools,
                mode="adaptive" if thinks else "disabled",
            )


def load(folder: Path, device: torch.device) -> tuple[Model, Tokenizer]:
    """A checkpoint's weights, as they are stored, in the trainable model."""
    spec = parse(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    model = Model(spec, device)
    with torch.no_grad():
        for path, stored in load_weights(folder, spec, DType.FP32, device).tensors():
            model.named[path].copy_(stored)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkpoint of the training script")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--problems", type=int, default=200, help="of each case")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 12288, 16000])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load(args.folder, device)
    held_out = HeldOut(tokenizer, args.problems)
    found = held_out.evaluate(model, args.lengths)
    for kind in tasks.arithmetic.OPERATORS:
        name = f"arithmetic {kind} {DISABLED}"
        found[name] = held_out.accuracy(model, name, Pass(model.spec.top_blocks))
    report = {"problems": args.problems, "torch": torch.__version__, "accuracy": found}
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
