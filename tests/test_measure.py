"""The measurement of the screen runs the real program; what it found is not judged here."""
from lora_bench.workbench import measure


def test_paint_reply_and_keys_are_found(sample_base, monkeypatch):
    monkeypatch.setattr(measure, "KEYS", measure.KEYS[:3])
    times = measure.measure()
    assert 0 < times.first_paint_s < times.ready_s < times.first_reply_s
    assert len(times.key_lag_ms) == 3
    assert times.lag(0.0) == times.key_lag_ms[0] and times.lag(1.0) == times.key_lag_ms[-1]
