"""The loop's parts: every parameter is trained once, the rate's course, the optimiser, balance."""

import json
from dataclasses import replace

import pytest
import torch
from training.data import Rows, make
from training.model import Model, Pass, Report
from training.optim import Optimizer, orthogonal
from training.train import PLANS, Plan, Stage, Trainer, _optimizer, _views

from minuet.models.m3.export import config_json
from minuet.models.m3.spec import parse
from training import checkpoint, evaluate

TOY = replace(
    PLANS["smoke"].shape, hidden=32, heads=4, kv_heads=2, head_dim=16, layers=2, expert_width=16
)


@pytest.fixture
def trainer(tmp_path):
    stages = (
        Stage("near", 15, (256,), 512, 2, sparse=False),
        Stage("sparse", 10, (256,), 512, 2, sparse=True),
    )
    plan = Plan(shape=TOY, stages=stages, warmup=5, rate=1e-2, eval_lengths=(224,), eval_problems=4)
    return Trainer(plan, torch.device("cpu"), tmp_path)


def test_matrices_and_the_rest_cover_every_parameter_once():
    model = Model(parse(config_json(replace(TOY, vocab=640))), torch.device("cpu"))
    covered = 0
    for path, parameter in model.named.items():
        if parameter.dim() > 1 and path not in ("embed", "lm_head") and "router" not in path:
            marks = torch.zeros_like(parameter)
            for view in _views(model.spec, path, marks):
                assert view.dim() == 2
                view += 1
            assert torch.equal(marks, torch.ones_like(marks)), path
            covered += 1
    assert covered == 10  # qkv, o of two layers; gate_up, down of MLP, experts, shared expert
    untouched = {path: tensor.detach().clone() for path, tensor in model.named.items()}
    optimizer = _optimizer(model)
    tokens = torch.randint(0, 600, (2, 96))
    hidden, report = model(tokens, Pass(watched=torch.arange(96).expand(2, -1)))
    (model.logits(hidden).logsumexp(-1).mean() + sum(report.index_losses)).backward()
    model.balance(report, 1e-3)
    optimizer.step(1e-2)
    same = [path for path, tensor in model.named.items() if torch.equal(tensor, untouched[path])]
    assert same == []


def test_a_step_of_muon_goes_where_the_gradient_points_and_forgets_it():
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = Optimizer([(weight, weight[:3]), (weight, weight[3:])], {"x": torch.zeros(1)})
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    (weight * gradient).sum().backward()
    optimizer.step(0.1)
    assert (weight * gradient).sum() < 0
    assert torch.equal(weight.grad, torch.zeros(6, 4))
    halves = torch.linalg.svdvals(weight.detach().view(2, 3, 4)) / (0.1 * 0.2 * 2)
    assert ((halves > 0.6) & (halves < 1.3)).all()  # each half orthogonalised by itself


@pytest.mark.parametrize("shape", [(8, 8), (16, 4), (3, 12)])
def test_orthogonal_keeps_the_spaces_and_evens_the_singular_values(shape):
    matrix = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert ((values > 0.6) & (values < 1.3)).all()


def test_the_rate_rises_stays_and_falls_to_nothing():
    plan = PLANS["full"]
    rates = [plan.rate_at(step) for step in range(plan.steps)]
    assert rates[0] == pytest.approx(plan.rate / plan.warmup)
    assert set(rates[plan.warmup : int((1 - plan.decay) * plan.steps)]) == {plan.rate}
    assert rates[-1] < 0.01 * plan.rate


def test_an_overloaded_expert_becomes_less_likely():
    model = Model(parse(config_json(replace(TOY, vocab=640))), torch.device("cpu"))
    loads = torch.tensor([0.9, *7 * [0.1]])
    model.balance(Report(loads=[loads]), 1e-3)
    bias = model.weights.layers[1].moe.bias
    assert bias[0] == -1e-3
    assert (bias[1:] == 1e-3).all()


def test_loss_falls_on_every_kind_of_row_and_the_log_says_so(trainer, tmp_path):
    rows = Rows(trainer.tokenizer, "train")
    rows.seed("0")
    batches = make(rows, trainer.plan.step(0))
    values = []
    for number in range(25):
        stage, _ = trainer.plan.stage(number)
        values.append({k: float(v) for k, v in trainer._step(number, stage, batches).items()})
    first, last = values[0], values[-1]
    for name in ("short_loss", "long_loss", "index_loss"):
        assert last[name] < (0.6 if name != "index_loss" else 0.99) * first[name], name
    found = trainer.evaluate()
    assert {"arithmetic *", "lists", "toolcalls", "needle 224 own block only"} <= set(found)
    checkpoint.write(tmp_path / "model", trainer.model, trainer.config, trainer.tokenizer)
    read, tokenizer = evaluate.load(tmp_path / "model", torch.device("cpu"))
    assert tokenizer.to_str() == trainer.tokenizer.to_str()
    for path, tensor in read.named.items():
        assert torch.allclose(tensor, trainer.model.named[path], rtol=2**-8), path
    trainer.log(step=25, eval=found)
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 25
