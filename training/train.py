"""Train minuet-tiny: one GPU, some nine minutes. README.md in this folder explains the choices.

    python -m training.train --out DIR                      the shipped model
    python -m training.train --out DIR --plan smoke         two minutes of a CPU, to see it work

Writes a checkpoint folder (DIR/minuet-tiny), log.jsonl (one line per report) and run.json (the
configuration, the accuracies at the end, the times).
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minuet.models.m3.export import Shape, config_json
from minuet.models.m3.sample_tokenizer import marker_ids
from minuet.models.m3.spec import M3Spec, parse
from minuet.models.m3.weights import packed_rows
from training import checkpoint, tokenizer
from training.data import Batch, Feed, Step
from training.evaluate import HeldOut
from training.model import Model, Pass, Report
from training.optim import Optimizer

WATCHED = 192
"""Queries per row that the indexer learns from."""


@dataclass(frozen=True)
class Stage:
    """Steps that are alike.

    Attributes:
        name: for the log.
        steps: how many.
        lengths: of long rows, in turn.
        long_tokens: tokens of long rows per step.
        short_rows: short rows per step.
        sparse: the sparse layers attend to chosen blocks; else to everything.
    """

    name: str
    steps: int
    lengths: tuple[int, ...]
    long_tokens: int
    short_rows: int
    sparse: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a run depends on.

    Attributes:
        shape: of the model.
        stages: in order.
        rate: learning rate, constant after the warm-up.
        warmup: steps to reach it.
        decay: share of the steps in which it falls to zero, at the end.
        text_weight: weight of targets that are no answers.
        balance: step of the routers' biases.
        seed: of weights and data.
        report_every: steps between reports.
        eval_every: steps between evaluations.
        eval_problems: problems per evaluation.
        eval_lengths: of needle texts.
    """

    shape: Shape
    stages: tuple[Stage, ...]
    rate: float = 3e-3
    warmup: int = 100
    decay: float = 0.3
    text_weight: float = 0.05
    balance: float = 1e-3
    seed: int = 0
    report_every: int = 50
    eval_every: int = 1100
    eval_problems: int = 200
    eval_lengths: tuple[int, ...] = (2048, 4096, 8192)

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    def stage(self, step: int) -> tuple[Stage, int]:
        """The stage of a step, and the step's number in it."""
        for stage in self.stages:
            if step < stage.steps:
                return stage, step
            step -= stage.steps
        raise IndexError(step)

    def step(self, number: int) -> Step:
        """What a step trains on."""
        stage, within = self.stage(number)
        length = stage.lengths[within % len(stage.lengths)]
        return Step(stage.short_rows, stage.long_tokens // length, length)

    def rate_at(self, step: int) -> float:
        """Learning rate: up, constant, down (WSD)."""
        up = (step + 1) / self.warmup
        down = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.rate * min(1.0, up, down)


TINY = Shape(
    layers=3,
    dense_layers=1,
    hidden=192,
    heads=32,
    kv_heads=2,
    head_dim=128,
    experts=8,
    topk_experts=2,
    expert_width=64,
    dense_width=384,
    shared_width=64,
    block=128,
    top_blocks=4,
    vocab=tokenizer.VOCAB,
    max_positions=16384,
    dtype="bfloat16",
)
_FAR = (2048, 4096, 2048, 8192)
_FULL = (
    Stage("near", 400, (512, 1024), 32768, 96, sparse=False),
    Stage("far", 700, _FAR, 32768, 96, sparse=False),
    Stage("sparse", 2000, _FAR, 16384, 96, sparse=True),
)
PLANS = {
    "full": Plan(shape=TINY, stages=_FULL),
    "smoke": Plan(
        shape=replace(
            TINY, hidden=64, heads=4, head_dim=32, block=16, dense_width=96, expert_width=32
        ),
        stages=(
            Stage("near", 30, (256,), 512, 2, sparse=False),
            Stage("sparse", 30, (256,), 512, 2, sparse=True),
        ),
        report_every=10,
        eval_every=30,
        eval_problems=4,
        eval_lengths=(256,),
        warmup=10,
    ),
}


# --- one step ----------------------------------------------------------


def watched(weights: Tensor, count: int) -> Tensor:
    """Positions of a row to learn selection from: those that predict answers, and others by chance.

    Args:
        weights: [B, T] of the targets, shifted to where they are predicted.
        count: positions per row.

    Returns:
        [B, count].
    """
    count = min(count, weights.shape[1])
    return (2 * weights + torch.rand_like(weights)).topk(count, dim=1, sorted=False).indices


def losses(
    model: Model, batch: Batch, how: Pass, text_weight: float, *, index: bool
) -> tuple[Tensor, Tensor, Report]:
    """Weighted cross entropy per token, correct answers' tokens, and the model's report."""
    device = model.weights.embed.device
    tokens = torch.from_numpy(batch.tokens).to(device, non_blocking=True).long()
    weights = torch.from_numpy(batch.weights(text_weight)).to(device, non_blocking=True)
    ahead = F.pad(weights[:, 1:], (0, 1))
    if index:
        how = replace(how, watched=watched(ahead, WATCHED))
    hidden, report = model(tokens, how)
    at = ahead.flatten().nonzero()[:, 0]  # nothing is predicted where nothing counts
    targets = F.pad(tokens[:, 1:], (0, 1)).flatten()[at]
    logits = model.logits(hidden.flatten(0, 1)[at])
    weight = ahead.flatten()[at]
    loss = (F.cross_entropy(logits, targets, reduction="none") * weight).sum() / weight.sum()
    answers = weight == 1.0
    right = ((logits.argmax(-1) == targets) & answers).sum() / answers.sum().clamp(min=1)
    return loss, right.detach(), report


class Trainer:
    """A run.

    Args:
        plan: everything it depends on.
        device: where.
        out: folder of the log.
    """

    def __init__(self, plan: Plan, device: torch.device, out: Path):
        self.plan, self.device, self.out = plan, device, out
        self.tokenizer = tokenizer.train()
        self.config = config_json(plan.shape, marker_ids(self.tokenizer))
        self.spec = parse(self.config)
        torch.manual_seed(plan.seed)
        self.model = Model(self.spec, device, plan.seed, fuse=device.type == "cuda")
        self.optimizer = _optimizer(self.model)
        # evaluation has many lengths, each of which the fused form would compile for
        self._selected = "fused" if device.type == "cuda" else "masked"
        (out / "log.jsonl").write_text("", encoding="utf-8")
        self._began = time.perf_counter()
        self._held_out = HeldOut(self.tokenizer, plan.eval_problems)

    def run(self, workers: int, seconds: float) -> dict[str, Any]:
        """Train; returns the accuracies at the end.

        Args:
            workers: processes that make rows.
            seconds: stop after this long, finished or not.
        """
        plan = self.plan
        steps = [plan.step(number) for number in range(plan.steps)]
        feed = Feed(self.tokenizer, steps, plan.seed, workers)
        sums: dict[str, Tensor | float] = {}
        waited = 0.0
        asked = time.perf_counter()
        done = 0
        for number, batches in enumerate(feed):
            waited += time.perf_counter() - asked
            stage, _ = plan.stage(number)
            for name, value in self._step(number, stage, batches).items():
                sums[name] = sums.get(name, 0.0) + value
            done = number + 1
            if done % plan.report_every == 0 or done == plan.steps:
                self._report(done, stage, sums, waited)
                sums, waited = {}, 0.0
                if self.elapsed > seconds:
                    break
            if done % plan.eval_every == 0 and done < plan.steps:
                self.log(step=done, eval=self.evaluate(quick=True))
            asked = time.perf_counter()
        final = self.evaluate()
        self.log(step=done, eval=final)
        return {"steps": done, "finished": done == plan.steps, **final}

    def evaluate(self, *, quick: bool = False) -> dict[str, Any]:
        """Accuracy on held-out problems; see :meth:`HeldOut.evaluate`."""
        found: dict[str, Any] = self._held_out.evaluate(
            self.model, self.plan.eval_lengths, quick=quick
        )
        return found

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def log(self, **values: Any) -> None:
        """Append a line, and show it."""
        line = json.dumps({**values, "seconds": round(self.elapsed, 1)})
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def _step(self, number: int, stage: Stage, batches: list[Batch]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for name, batch in zip(("short", "long"), batches, strict=False):
            how = Pass(self.spec.top_blocks if stage.sparse else 0, selected=self._selected)
            loss, right, report = losses(
                self.model, batch, how, self.plan.text_weight, index=name == "long"
            )
            values |= {f"{name}_loss": loss.detach(), f"{name}_right": right}
            if report.index_losses:
                learned = torch.stack(report.index_losses).mean()
                loss = loss + learned
                values["index_loss"] = learned.detach()
                recalls = torch.stack(report.recalls)
                values |= {f"recall_{i}": recall for i, recall in enumerate(recalls)}
            loss.backward()
            self.model.balance(report, self.plan.balance)
        values["most_loaded"] = torch.stack(report.loads).max().detach()
        self.optimizer.step(self.plan.rate_at(number))
        return values

    def _report(
        self, done: int, stage: Stage, sums: dict[str, Tensor | float], waited: float
    ) -> None:
        every = self.plan.report_every
        means = {name: round(float(value) / every, 4) for name, value in sums.items()}
        self.log(step=done, stage=stage.name, waited=round(waited, 2), **means)


def _optimizer(model: Model) -> Optimizer:
    matrices: list[tuple[Tensor, Tensor]] = []
    others: dict[str, Tensor] = {}
    for path, parameter in model.named.items():
        if path.endswith(".bias"):
            continue
        if parameter.dim() < 2 or path in ("embed", "lm_head") or path.endswith(".router"):
            others[path] = parameter
        else:
            matrices += [(parameter, view) for view in _views(model.spec, path, parameter)]
    return Optimizer(matrices, others)


def _views(spec: M3Spec, path: str, parameter: Tensor) -> Iterator[Tensor]:
    """The projections packed into a parameter, one by one."""
    name = path.rpartition(".")[2]
    if name == "qkv":
        sizes = [rows for _, rows in packed_rows(spec, int(path.split(".")[1]))]
        yield from parameter.split(sizes)
        return
    for matrix in parameter.flatten(0, -3) if parameter.dim() > 2 else [parameter]:
        yield from matrix.chunk(2) if name == "gate_up" else (matrix,)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plan", choices=list(PLANS), default="full")
    parser.add_argument("--workers", type=int, default=16, help="processes that make rows")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop training after this long")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = PLANS[args.plan]
    trainer = Trainer(plan, device, args.out)
    trainer.log(plan=args.plan, device=str(device))
    accuracy = trainer.run(args.workers, args.seconds)
    checkpoint.write(args.out / "minuet-tiny", trainer.model, trainer.config, trainer.tokenizer)
    run = {
        "plan": asdict(plan),
        "parameters": sum(p.numel() for p in trainer.model.named.values()),
        "workers": args.workers,
        "accuracy": accuracy,
        "seconds": round(trainer.elapsed, 1),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    }
    (args.out / "run.json").write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
