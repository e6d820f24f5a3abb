"""The bounds of the step experiment are held against the right cells, and can be missed."""

from benchmarks import step


def cells(**changes):
    found = []
    for kv in step.KV_TYPES:
        for batch, context in step.CELLS:
            cell = {
                "kv_cache_dtype": kv,
                "batch_size": batch,
                "context": context,
                "step_ms": {"median": 1.0 if kv == "bfloat16" else 0.99},
                "overhead_us_per_layer": {"arch": 44.0, "plain_read": 1.0},
                "fraction_of_limit": {"arch": 0.6, "plain_read": 0.9},
            }
            found.append(cell | changes.get(f"{kv}_{batch}_{context}", {}))
    return found


def held(**changes):
    return [judged["held"] for judged in step.judge(cells(**changes)).values()]


def test_each_bound_looks_at_its_own_cell():
    assert held() == [True] * 4
    slow = {"overhead_us_per_layer": {"arch": 44.1, "plain_read": 1.0}}
    assert held(bfloat16_4_8704=slow) == [False, True, True, True]
    assert held(bfloat16_64_8704=slow) == [True] * 4
    far = {"fraction_of_limit": {"arch": 0.59, "plain_read": 0.9}}
    assert held(bfloat16_64_8704=far) == [True, False, True, True]
    assert held(fp8_4_8704={"step_ms": {"median": 1.03}}) == [True, True, False, True]
    assert held(fp8_4_131072={"step_ms": {"median": 1.0}}) == [True, True, True, False]
    assert held(fp8_64_8704={"step_ms": {"median": 9.0}}) == [True] * 4
