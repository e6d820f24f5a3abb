"""The seal experiment does what its page says, and its bounds can be missed."""

from benchmarks import seal


def test_each_length_comes_once_as_new_and_then_as_repeated():
    asked = seal.plan_requests(2000, 4000, 16, seed=1)
    assert len(asked) == 2000
    lengths = {request.length for request in asked}
    assert {1, 4000} <= lengths
    assert len(lengths) == 1000
    seen = set()
    for request in asked:
        assert request.is_new == (request.length not in seen)
        assert 1 <= request.output <= 16
        seen.add(request.length)
    # in turn, so that neither half has another time of the run to itself
    middle = [request.is_new for request in asked[200:1800]]
    assert sum(middle) == len(middle) // 2


def test_few_possible_lengths_are_each_used_once_as_new():
    asked = seal.plan_requests(100, 8, 4, seed=0)
    assert sorted(r.length for r in asked if r.is_new) == list(range(1, 9))


def test_the_experiment_runs_and_counts_on_a_cpu(checkpoint):
    flags = ["--load-format", "auto", "--arch", "cpu", "--requests", "40", "--output-tokens", "4"]
    flags += ["--max-model-len", "64", "--max-num-batched-tokens", "64", "--concurrency", "3"]
    found = seal.run(seal.parse([str(checkpoint("tiny")), *flags]))
    assert found["requests"] == 40
    assert found["lengths"] == {"shortest": 1, "longest": 60, "different": 20}
    assert found["errors"] == []
    assert found["output_tokens"] <= 160
    assert found["ttft_ms"]["new_length"]["samples"] == 20
    assert found["ttft_ms"]["repeated_length"]["samples"] == 20
    assert found["bounds"]["every request was answered"]
    assert found["bounds"]["compilations after ready = 0"]
    # one look at memory is no slope, and no slope is no promise kept
    assert not found["bounds"]["memory slope <= 0.1 MiB / 100 requests"]


def test_every_bound_can_be_missed():
    good = {
        "errors": [],
        "nonfinite": 0,
        "after_ready": {"compilations": 0, "decode_growth_bytes": 0, "growth_bytes": 5},
        "activation_budget_bytes": 5,
        "slope_mib_per_100_requests": {"device_mib": 0.1},
        "ttft_p99_ratio": 1.1,
    }
    assert all(seal.judge(good, True).values())
    bad = (
        {"errors": ["x"]},
        {"after_ready": {**good["after_ready"], "compilations": 1}},
        {"after_ready": {**good["after_ready"], "decode_growth_bytes": 1}},
        {"activation_budget_bytes": 4},
        {"slope_mib_per_100_requests": {"device_mib": 0.2}},
        {"ttft_p99_ratio": 1.2},
    )
    for change in bad:
        held = seal.judge({**good, **change}, True)
        assert list(held.values()).count(False) == 1


def test_slopes_are_per_hundred_requests():
    samples = [{"requests": n, "device_mib": 7 + n / 50, "host_mib": 3.0} for n in (20, 100, 200)]
    assert seal.slopes(samples) == {"device_mib": 2.0, "host_mib": 0.0}
    assert seal.slopes(samples[:1]) == {}
