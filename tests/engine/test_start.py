"""What start-up refuses by the machine it runs on."""

import pytest

from minuet.config import read_options
from minuet.engine import start as starting
from minuet.errors import RefusedError
from minuet.platform.torch import host_memory_bytes


def begin(folder, **settings):
    options = read_options({"model": str(folder), "arch": "cpu", **settings})
    return starting.start(options, lambda line: None)


def test_a_model_larger_than_the_machine_is_refused_before_anything_is_loaded(monkeypatch):
    def load(*anything):
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(starting, "_weights", load)
    with pytest.raises(
        RefusedError, match="minimax-m3 is planned on cpu, but cannot run here"
    ) as refused:
        begin("minimax-m3", load_format="dummy")
    (refusal,) = refused.value.refusals
    assert "weights" in refusal.got
    assert refusal.flag == ""  # no flag makes weights smaller


def test_a_pool_larger_than_the_machine_is_refused_with_one_that_fits(checkpoint, monkeypatch):
    folder = checkpoint("tiny")
    host = 2**26
    monkeypatch.setattr(starting, "host_memory_bytes", lambda: host)
    with pytest.raises(RefusedError) as refused:
        begin(folder, kv_cache_memory=2**30)
    (refusal,) = refused.value.refusals
    assert refusal.flag == "--kv-cache-memory"
    engine = begin(folder, kv_cache_memory=refusal.value)
    assert engine.plan.memory.kv_bytes + engine.plan.memory.weight_bytes <= host


def test_a_machine_that_does_not_say_refuses_nothing(checkpoint, monkeypatch):
    monkeypatch.setattr(starting, "host_memory_bytes", lambda: None)
    assert begin(checkpoint("tiny"), kv_cache_pages=4).plan.memory.num_pages == 4


def test_this_machine_says_how_much_memory_it_has():
    held = host_memory_bytes()
    assert held is None or 2**28 < held < 2**50
