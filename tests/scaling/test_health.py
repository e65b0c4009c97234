from __future__ import annotations

import itertools
import json
import math

import pytest

from lightning_memprec.scaling.diagnosis import DIAGNOSES, make_event
from lightning_memprec.scaling.health import MAX_EVENTS, ScalerHealth
from lightning_memprec.scaling.record import StepRecord

NAN, INF = float("nan"), float("inf")


class Scaler:
    """The rule of torch's scaler in plain Python: halve on overflow, double after an interval without one."""

    def __init__(self, scale=2.0**16, interval=2000):
        self.scale, self.interval, self.good = scale, interval, 0

    def step(self, limit):
        """Return the scale of a step, and whether it overflowed: it does at ``limit`` and above."""
        scale, skipped = self.scale, self.scale >= limit
        self.good = 0 if skipped else self.good + 1
        if skipped:
            self.scale /= 2
        elif self.good == self.interval:
            self.scale, self.good = self.scale * 2, 0
        return scale, skipped


def play(health, limits, scaler=None, **figures):
    """Feed one step a limit; return kinds of events in order."""
    scaler = Scaler() if scaler is None else scaler
    start = sum(health.totals.steps.values())
    events = []
    for step, limit in enumerate(limits, start):
        scale, skipped = scaler.step(limit)
        record = StepRecord(step, step, scale=scale, skipped=skipped, **{"loss": 1.0, **figures})
        events += health.observe(record)
    return [event.kind for event in events]


@pytest.mark.parametrize("skips", [1, 5, 16])
def test_skips_at_the_start_are_calibration(skips):
    health = ScalerHealth()
    assert play(health, [2.0 ** (17 - skips)] * 60) == ["calibration"]
    assert health.events[0].figures["skips"] == skips
    assert health.events[0].figures["scale"] == 2.0 ** (16 - skips)
    assert health.events[0].severity == "info"
    assert health.skip_rate == 0


def test_more_skips_than_calibration_takes_are_an_explosion():
    assert play(ScalerHealth(), [1.0] * 20)[0] == "exploding"


def test_skips_after_growth_are_probing_and_told_once():
    # The limit lies at 2^16: each growth to it overflows at once and is taken back.
    scaler = Scaler(scale=2.0**15, interval=4)
    assert play(ScalerHealth(), [2.0**16] * 60, scaler) == ["probing"]


def test_a_single_bad_batch_is_named():
    health = ScalerHealth()
    limits = [INF] * 30 + [0.0] + [INF] * 30
    assert play(health, limits, Scaler(scale=1024.0), culprit="layer.weight") == ["isolated_skip"]
    event = health.events[0]
    assert event.figures["skipped_batch_idx"] == 30
    assert event.figures["held"] == 30
    assert "batch 30" in event.message
    assert "layer.weight" in event.message


def test_bad_batches_are_not_told_again_before_a_calm_window():
    health = ScalerHealth(window=20)
    near, far = [0.0] + [INF] * 10, [0.0] + [INF] * 30
    assert play(health, [INF] * 20 + near + near + far + far, Scaler(scale=2.0**20)) == ["isolated_skip"] * 2


def test_explosion_needs_a_low_scale_and_frequent_skips():
    health = ScalerHealth()
    limits = [INF] * 100 + [0.0] * 14 + [INF] * 10
    assert play(health, limits) == ["exploding"]
    event = health.events[0]
    assert event.severity == "warning"
    # 2^16 is 16 or more until the 13th halving.
    assert event.figures["scale"] == 8.0
    assert event.figures["rate"] == pytest.approx(13 / 100, abs=0.02)


@pytest.mark.parametrize(
    "limits", [[INF] * 50 + [0.0] * 8 + [INF] * 50, [INF] * 400], ids=["high-scale", "low-scale-no-skips"]
)
def test_neither_alone_is_an_explosion(limits):
    scaler = Scaler(scale=2.0**16 if 0.0 in limits else 2.0)
    assert "exploding" not in play(ScalerHealth(), limits, scaler)


def test_explosion_is_told_again_after_it_has_ended():
    health = ScalerHealth(window=20)
    burst, calm = [0.0] * 10, [INF] * 100
    scaler = Scaler(scale=2.0**10, interval=50)
    play(health, calm[:20] + burst + calm + burst + calm, scaler)
    # 2^10 is below 16 after the seventh halving. The calm between brings the scale back by only two doublings,
    # so the second burst starts below 16 and is told as soon as it is frequent.
    assert [event.step for event in health.events if event.kind == "exploding"] == [20 + 7, 130 + 2]


def test_fall_below_one_and_collapse_are_told_once_each():
    health = ScalerHealth()
    kinds = play(health, [INF] * 20 + [0.0] * 60)
    assert [kind for kind in kinds if kind != "exploding"] == ["range_insufficient", "collapse"]
    collapse = health.events[-1]
    assert collapse.figures["scale"] == 2.0**-20
    assert collapse.figures["first_skip"] == 20
    # 36 halvings from 2^16.
    assert collapse.step == 20 + 36


def test_scale_of_zero_is_a_collapse_even_where_no_overflow_is_found():
    (event,) = ScalerHealth().observe(StepRecord(5, 5, scale=0.0, skipped=False))
    assert event.kind == "collapse"
    assert "collapsed to 0" in event.message


def test_a_run_of_skips_at_the_floor_is_no_collapse_but_a_standstill():
    health = ScalerHealth(min_scale=1024.0)
    events = [health.observe(StepRecord(i, i, scale=1024.0, skipped=i >= 5)) for i in range(40)]
    (told,) = [event for step in events for event in step if event.severity == "warning"]
    assert (told.kind, told.step) == ("stuck_at_floor", 5 + 16)
    # Nothing underflows at 1024, and there is a floor already.
    assert told.message.startswith("17 steps in a row were skipped at the floor of 1024")
    assert "set a lower `min_scale`" in told.message


def test_good_steps_within_a_fall_do_not_move_its_beginning():
    health, scale = ScalerHealth(), 1024.0
    for step in range(120):
        skipped = step >= 40 and step % 2 == 0
        health.observe(StepRecord(step, step, scale=scale, skipped=skipped))
        scale *= 0.5 if skipped else 1.0
    (collapse,) = [event for event in health.events if event.kind == "collapse"]
    assert collapse.figures["first_skip"] == 40


def test_a_fall_begins_anew_after_a_time_of_good_steps():
    health = ScalerHealth()
    play(health, [INF] * 3 + [2.0] + [INF] * 40 + [0.0] * 60)
    (collapse,) = [event for event in health.events if event.kind == "collapse"]
    assert collapse.figures["first_skip"] == 44


def test_norms_shrinking_by_one_factor_are_no_clipping():
    health = ScalerHealth()
    for step in range(5):
        health.observe(StepRecord(step, step, scale=8.0, grad_norm=1.0, backward_norm=32.0))
    assert not health.events
    for step, before in enumerate((32.0, 48.0), 5):
        health.observe(StepRecord(step, step, scale=8.0, grad_norm=1.0, backward_norm=before))
    assert [event.kind for event in health.events] == ["clip_before_unscale"]


def test_non_finite_losses_explain_skips_and_a_falling_scale():
    health = ScalerHealth()
    scaler = Scaler()
    play(health, [INF] * 20, scaler)
    kinds = play(health, [0.0] * 25, scaler, loss=NAN, bad_batch_idx=7)
    assert kinds == ["non_finite_loss", "loss_stays_non_finite"]
    assert "at batch 7" in health.events[0].message
    assert health.events[1].figures == {"consecutive": 8, "first_step": 20}
    assert health.totals.non_finite_losses == 25


def test_non_finite_loss_is_told_again_after_finite_ones():
    health = ScalerHealth()
    for step, loss in enumerate([NAN, 1.0, NAN] + [1.0] * 10 + [INF]):
        health.observe(StepRecord(step, step, loss=loss))
    assert [event.step for event in health.events] == [0, 13]
    assert "the step was taken all the same" in health.events[0].message


def norms(health, values, **figures):
    start = sum(health.totals.steps.values())
    for step, norm in enumerate(values, start):
        health.observe(StepRecord(step, step, grad_norm=norm, loss=1.0, **figures))
    return [event.kind for event in health.events]


def test_gradients_that_are_all_zero_are_underflow():
    assert norms(ScalerHealth(), [1.0, 0.0, 1.0, 0.0], scale=1.0) == []
    health = ScalerHealth()
    assert norms(health, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], scale=0.5) == ["underflow"] * 2
    assert "at scale 0.5" in health.events[0].message


def test_rising_norm_is_told_once_per_rise():
    health = ScalerHealth()
    assert norms(health, [1.0] * 20 + [13.0, 1.0, 13.0, 13.0]) == []
    assert norms(health, [14.0, 15.0, 16.0]) == ["norm_rising"]
    assert health.events[0].figures["norm"] == 14.0


def test_non_finite_gradients_matter_where_no_scaler_skips():
    assert norms(ScalerHealth(), [1.0, INF], scale=65536.0, skipped=True) == []
    health = ScalerHealth()
    assert norms(health, [1.0, NAN, NAN], culprit="head.bias") == ["non_finite_gradients"]
    assert "head.bias" in health.events[0].message


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        # Clipped at 1.0 while scaled by 1024: whatever came, 1.0 is left.
        ([1.0, 1.0], ["clip_before_unscale"]),
        # Divided by 4 batches: shrunk, but not to one norm.
        ([75.0, 50.0], []),
        # Untouched.
        ([300.0, 200.0], []),
    ],
    ids=["clipped", "divided", "untouched"],
)
def test_clipping_of_scaled_gradients_shows_in_the_norms(after, expected):
    health = ScalerHealth()
    for step, (before, left) in enumerate(zip([300.0, 200.0], after, strict=True)):
        health.observe(
            StepRecord(step, step, scale=1024.0, backward_norm=before, grad_norm=left / 1024, loss=1.0)
        )
    assert [event.kind for event in health.events] == expected


def test_optimizers_of_one_batch_share_the_growth_interval():
    health = ScalerHealth()
    health.growth_interval = 2000
    for step in range(6):
        health.observe(StepRecord(step, step // 2, scale=1024.0, optimizer=step % 2))
    assert [event.kind for event in health.events] == ["growth_shared"]
    assert health.events[0].figures["growth_batches"] == 1000
    assert "growth_interval=4000" in health.events[0].message


def test_skips_are_counted_by_optimizer():
    health = ScalerHealth()
    for step in range(10):
        health.observe(StepRecord(step, step // 2, scale=1024.0, optimizer=step % 2, skipped=step == 3))
    assert health.totals.steps == {0: 5, 1: 5}
    assert health.totals.skipped == {0: 0, 1: 1}
    assert "10 optimizer steps, 1 skipped (10.0%) (optimizer 0: 0, optimizer 1: 1)" in health.summary()


def test_state_goes_on_as_if_there_had_been_no_break():
    limits = [2.0**14] * 10 + [INF] * 40 + [0.0] * 30 + [INF] * 20 + [0.0] * 40
    whole, scaler = ScalerHealth(), Scaler(interval=7)
    play(whole, limits, scaler)
    for cut in (3, 30, 60, 100):
        first, second, scaler = ScalerHealth(), ScalerHealth(), Scaler(interval=7)
        play(first, limits[:cut], scaler)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        play(second, limits[cut:], scaler)
        assert second.state_dict() == whole.state_dict(), cut


def test_a_collapsed_run_that_is_resumed_is_told_again():
    first, second = ScalerHealth(), ScalerHealth()
    record = StepRecord(5, 5, scale=2.0**-24, skipped=True)
    assert [event.kind for event in first.observe(record)] == ["range_insufficient", "collapse"]
    second.load_state_dict(first.state_dict())
    assert [event.kind for event in second.observe(record)] == ["collapse"]


def test_state_of_another_version_is_refused():
    with pytest.raises(ValueError, match="has version 2, but this package reads version 1"):
        ScalerHealth().load_state_dict({"version": 2})


def test_report_is_strict_json():
    health = ScalerHealth()
    health.observe(StepRecord(0, 0, scale=65536.0, skipped=True, loss=NAN, grad_norm=INF))
    report = json.loads(json.dumps(health.to_dict(), allow_nan=False))
    assert report["events"][0]["figures"]["loss"] == "nan"
    assert report["history"][0]["grad_norm"] == "inf"


def test_memory_is_bounded():
    health = ScalerHealth()
    for step in range(20_000):
        health.observe(StepRecord(step, step, scale=1024.0, skipped=step % 500 == 499))
        if step % 10 == 0:
            health.tell("floor_held", step, step, {"scale": 1.0, "min_scale": 2.0})
    assert len(health.events) == MAX_EVENTS
    points = health.history.points
    assert len(points) <= 4096
    assert sum(point.skipped for point in points) == 40
    steps = [point.step for point in points]
    assert steps == sorted(steps)
    assert steps[-1] == 19_999
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 16


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("totals", "steps", {"0": "x"}), ("totals", "growths", None), ("totals", "lowest_scale", "low"),
        ("scale", "held", "x"), ("scale", "last_scale", "x"), ("history", "points", [[0, "x", False, None]]),
        ("history", "points", 3), ("norm", "norms", ["x"]),
    ],
)  # fmt: skip
def test_state_with_values_of_another_kind_is_refused(part, name, value):
    state = ScalerHealth().state_dict()
    state[part][name] = value
    with pytest.raises((ValueError, TypeError)):
        ScalerHealth().load_state_dict(state)


@pytest.mark.parametrize("kind", DIAGNOSES)
def test_every_diagnosis_can_be_said_without_figures(kind):
    event = make_event(kind, 3, 4, {})
    assert not set("{}") & set(event.message)
    assert event.severity in ("info", "warning")
    # A warning always says what to do.
    assert event.severity == "info" or "What to do" in event.message


def test_summary_says_whether_anything_was_wrong():
    health = ScalerHealth()
    assert health.summary() == "No optimizer step was observed."
    play(health, [2.0**15] * 5)
    assert health.summary().endswith("Healthy: nothing to warn about.")
    play(health, [1.0] * 5, Scaler(scale=0.5), loss=NAN)
    assert "Warnings: non_finite_loss (1)." in health.summary()
    assert math.isfinite(health.totals.lowest_scale)
