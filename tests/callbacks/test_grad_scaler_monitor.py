"""What the monitor sees and says; runs are built so that every overflow is known."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import pickle
from pathlib import Path

import pytest
import torch

from lightning_memprec.callbacks.grad_scaler_monitor import GradScalerMonitor
from lightning_memprec.scaling.diagnosis import DIAGNOSES
from lightning_memprec.scaling.errors import ScalerCollapseError
from lightning_memprec.scaling.record import Event

from .runs import NAMESPACES
from .scaler_runs import (
    INF,
    NAN,
    fused,
    hearing,
    kinds,
    loader,
    make_module,
    make_plugin,
    make_trainer,
    one_line,
    run,
    sgd,
    warned,
)

pytestmark = [
    # torch says so of every schedule whose first step is skipped.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
OPTIMIZERS = pytest.mark.parametrize("optimizer", [sgd, fused], ids=["plain", "fused"])


def told(monitor, kind):
    """Return the message of the one event of a kind."""
    (event,) = [event for event in monitor.events if event.kind == kind]
    return event.message


def skipped(monitor):
    return [point.step for point in monitor.health.history.points if point.skipped]


@pytest.mark.parametrize("name", NAMESPACES)
@OPTIMIZERS
def test_calibration_at_the_start(name, optimizer):
    # 2^16, 2^15 and 2^14 times 4 overflow; 2^13 does not.
    monitor, _ = run([4] * 8, module=make_module(name, optimizer), name=name)
    assert kinds(monitor) == ["calibration"]
    assert monitor.events[0].figures == {"skips": 3, "scale": 2.0**13}
    assert skipped(monitor) == [0, 1, 2]
    assert monitor.summary().startswith("8 optimizer steps, 3 skipped (37.5%); loss scale 8192 at the end")


@OPTIMIZERS
def test_probing_at_the_growth_interval(optimizer):
    plugin = make_plugin(init_scale=2.0**15, growth_interval=3)
    monitor, _ = run([1] * 12, module=make_module(optimizer=optimizer), plugin=plugin)
    assert kinds(monitor) == ["probing"]
    # Three good steps, then 2^16 overflows.
    assert skipped(monitor) == [3, 7, 11]
    assert monitor.events[0].figures["scale"] == 2.0**16


@OPTIMIZERS
def test_one_bad_batch_is_named(optimizer):
    plugin = make_plugin(init_scale=1024.0)
    monitor, _ = run([1] * 5 + [500] + [1] * 3, module=make_module(optimizer=optimizer), plugin=plugin)
    assert kinds(monitor) == ["isolated_skip"]
    assert monitor.events[0].figures["skipped_batch_idx"] == 5
    assert monitor.events[0].figures["loss"] == pytest.approx(1000, rel=0.01)
    assert skipped(monitor) == [5]


class Hookless(torch.optim.SGD):
    """An optimizer that does not tell when it has stepped, as some wrappers do not."""

    @property
    def register_step_post_hook(self):
        raise AttributeError


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
def test_skips_are_seen_without_step_hooks(is_fused):
    module = make_module(optimizer=lambda parameters: Hookless(parameters, lr=1e-6, fused=is_fused))
    monitor, _ = run([1] * 3 + [500] + [1] * 2, module=module, plugin=make_plugin(init_scale=1024.0))
    assert skipped(monitor) == [3]
    assert kinds(monitor) == ["isolated_skip"]


def test_first_parameter_with_an_overflowing_gradient_is_named():
    module = make_module()
    with torch.no_grad():
        module.first.weight.mul_(100)
    # The gradient of the outputs is 500 x 64 and fits; times the second layer's inputs it does not.
    monitor, _ = run([1] * 3 + [500] + [1], module=module, plugin=make_plugin(init_scale=64.0))
    assert monitor.events[0].figures["culprit"] == "second.weight"


def test_explosion():
    plugin = make_plugin(init_scale=64.0)
    with warned():
        monitor, _ = run([1] * 20 + [10_000] * 4, plugin=plugin)
    assert kinds(monitor) == ["exploding"]
    message = told(monitor, "exploding")
    assert message.startswith(
        "The loss scale is 8 and 17% of the last 24 steps were skipped; the scale's fall began at batch 20 of epoch 0"
    )
    assert "(3) look at the data of batch 20 of epoch 0, where it began" in message


def test_underflow():
    # 2^-30 times 2 is below the smallest FP16 number.
    with warned():
        monitor, _ = run([2.0**-30] * 3, plugin=make_plugin(init_scale=2.0))
    assert kinds(monitor) == ["underflow"]
    assert "Every gradient is exactly 0 at scale 2 while" in told(monitor, "underflow")


@pytest.mark.parametrize("value", [NAN, INF], ids=["nan", "inf"])
@OPTIMIZERS
def test_non_finite_loss(value, optimizer):
    plugin = make_plugin(init_scale=1024.0)
    with warned():
        monitor, _ = run([1, 1, value, 1], module=make_module(optimizer=optimizer), plugin=plugin)
    assert kinds(monitor) == ["non_finite_loss"]
    assert f"The loss is {value} at batch 2" in told(monitor, "non_finite_loss")
    assert skipped(monitor) == [2]


def test_loss_that_stays_non_finite_explains_everything_that_follows():
    with warned():
        monitor, _ = run([1] + [NAN] * 20, plugin=make_plugin(init_scale=1024.0))
    assert kinds(monitor) == ["non_finite_loss", "loss_stays_non_finite"]


@OPTIMIZERS
def test_collapse_can_raise(optimizer):
    monitor = GradScalerMonitor(on_collapse="raise")
    plugin = make_plugin(init_scale=2.0**-19)
    module = make_module(optimizer=optimizer)
    with (
        warned(),
        pytest.raises(ScalerCollapseError, match=r"collapsed to 9\.53674e-07.* from before step 0") as caught,
    ):
        run([NAN] * 6, monitor, module, plugin=plugin)
    assert caught.value.event.figures["scale"] == 2.0**-20
    assert caught.value.event.step == 1
    assert "clip_gradients" not in vars(plugin)


def test_collapse_can_stop():
    monitor = GradScalerMonitor(on_collapse="stop")
    with warned() as said:
        _, trainer = run([NAN] * 6, monitor, plugin=make_plugin(init_scale=2.0**-19))
    assert trainer.global_step == 2
    stops = [(level, one_line(text)) for level, text in said if ", stop" in text]
    assert stops == [
        (
            "WARNING",
            "[warning] GradScalerMonitor, step 2, stop The Trainer is told to end training, because of `collapse` "
            "and `on_collapse='stop'`.",
        )
    ]


@pytest.mark.parametrize("name", NAMESPACES)
def test_every_fit_of_a_process_is_told_the_same_in_short_lines(name):
    texts = []
    for _ in range(3):
        with hearing(name) as said:
            run([1] * 20 + [10_000] * 4, name=name, plugin=make_plugin(name, init_scale=64.0))
        texts.append([text for level, text in said if level == "WARNING"])
    assert texts[0] == texts[1] == texts[2]
    (text,) = texts[0]
    head, *body = text.splitlines()
    assert head == "[warning] GradScalerMonitor, step 23, exploding"
    assert all(line.startswith("  ") and len(line) <= 88 for line in body)
    assert one_line("".join(f"{line} " for line in body)).startswith("The loss scale is 8 and")


@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@pytest.mark.parametrize(
    "options", [{"precision": "16-mixed"}, {"precision": "32-true"}], ids=lambda o: o["precision"]
)
def test_a_run_without_a_scaler_is_told_and_summed_up_as_that(options):
    monitor = GradScalerMonitor()
    with hearing() as said:
        # On a CPU Lightning takes bf16 instead of `16-mixed`.
        make_trainer(monitor, **options).fit(make_module(), loader([1] * 3))
    precision = {"16-mixed": "bf16-mixed"}.get(options["precision"], options["precision"])
    sentence = (
        f"No loss scaler in this run's precision plugin ({precision}): only losses and gradients are watched."
    )
    texts = [one_line(text) for _, text in said]
    assert f"[info] GradScalerMonitor {sentence}" in texts
    assert monitor.summary().startswith("3 optimizer steps; largest measured gradient norm")
    assert sentence in monitor.summary()
    assert f"[info] GradScalerMonitor, summary {monitor.summary()}" in texts


def test_a_run_with_a_scaler_after_one_without_does_not_claim_to_have_none():
    monitor = GradScalerMonitor()
    run([1] * 2, monitor, plugin=make_plugin(precision="bf16-mixed"))
    run([1] * 2, monitor, plugin=make_plugin(init_scale=2.0))
    assert "No loss scaler" not in monitor.summary()


def test_the_beginning_of_an_explosion_is_named_in_its_own_epoch():
    plugin = make_plugin(init_scale=64.0)
    module = make_module(
        training_step=lambda self, batch, idx: self.loss(batch) * ((idx >= 6 and self.late) or 1)
    )
    module.late = 1

    def on_train_epoch_start():
        module.late = 10_000 if module.trainer.current_epoch == 2 else 1

    module.on_train_epoch_start = on_train_epoch_start
    with warned():
        monitor, _ = run([1] * 10, module=module, plugin=plugin, max_epochs=3)
    assert "began at batch 6 of epoch 2" in told(monitor, "exploding")
    assert monitor.events[0].step == 20 + 6 + 3


def test_scale_of_zero_writes_nan_undetected_and_is_told():
    plugin = make_plugin(init_scale=2.0**-149)  # The smallest number of FP32: half of it is 0.
    module = make_module()
    with warned():
        monitor, _ = run([INF, 1, 1], GradScalerMonitor(), module, plugin=plugin)
    assert kinds(monitor)[:2] == ["non_finite_loss", "collapse"]
    # That is why it is a collapse: at 0 the scaler finds nothing and lets NaN through.
    assert [point.scale for point in monitor.health.history.points] == [2.0**-149, 0, 0]
    assert skipped(monitor)[:1] == [0]
    assert 1 not in skipped(monitor)
    assert module.first.weight.isnan().all()


def test_floor_holds_the_scale():
    monitor = GradScalerMonitor(min_scale=256.0)
    plugin = make_plugin(init_scale=1024.0)
    with warned():
        run([1000] * 6, monitor, plugin=plugin)
    assert plugin.scaler.get_scale() == 256.0
    assert kinds(monitor) == ["floor_held"]
    assert "would have fallen to 128 and was held at the floor of 256" in told(monitor, "floor_held")
    assert [point.scale for point in monitor.health.history.points] == [1024, 512, 256, 256, 256, 256]


@pytest.mark.parametrize("action", ["stop", "raise"])
def test_a_standstill_at_the_floor_ends_the_run(action):
    monitor = GradScalerMonitor(min_scale=256.0, on_collapse=action)
    module = make_module()
    with warned(), contextlib.ExitStack() as stack:
        if action == "raise":
            stack.enter_context(pytest.raises(ScalerCollapseError, match="17 steps in a row were skipped"))
        run([1000] * 20, monitor, module, plugin=make_plugin(init_scale=256.0))
    assert kinds(monitor) == ["floor_held", "stuck_at_floor"]
    assert module.trainer.global_step == 17


@pytest.mark.parametrize("hold", [False, True])
@OPTIMIZERS
def test_schedule_on_skipped_steps(hold, optimizer):
    monitor = GradScalerMonitor(hold_schedule=hold)
    module = make_module(optimizer=optimizer, schedule=True)
    _, trainer = run([4] * 5, monitor, module)
    # Five batches, three skipped steps; the rate halves with each step of the scheduler.
    steps = 2 if hold else 5
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-6 * 0.5**steps)
    assert ("scheduler_on_skip" in kinds(monitor)) is not hold
    assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)


@pytest.mark.parametrize("frequency", [1, 4])
def test_scheduler_that_did_not_step_on_the_skip_is_not_blamed(frequency):
    module = make_module()

    def configure_optimizers():
        made = sgd(module.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        return {
            "optimizer": made,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": frequency},
        }

    module.configure_optimizers = configure_optimizers
    monitor, _ = run([1, 500, 1], GradScalerMonitor(), module, plugin=make_plugin(init_scale=256.0))
    assert ("scheduler_on_skip" in kinds(monitor)) is (frequency == 1)


def test_schedule_by_epoch_is_not_held():
    module = make_module()
    module.configure_optimizers = lambda: (
        [made := sgd(module.parameters())],
        [torch.optim.lr_scheduler.StepLR(made, 1, 0.5)],
    )
    monitor, trainer = run([4], GradScalerMonitor(hold_schedule=True), module)
    assert skipped(monitor) == [0]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5e-6)


@OPTIMIZERS
def test_accumulation_names_the_batch_within_the_window(optimizer):
    plugin = make_plugin(init_scale=1024.0)
    with warned():
        monitor, _ = run(
            [1, 1, 1, 1, 1, NAN, 1, 1],
            module=make_module(optimizer=optimizer),
            plugin=plugin,
            accumulate_grad_batches=4,
        )
    assert monitor.health.totals.steps == {0: 2}
    assert skipped(monitor) == [1]
    assert monitor.events[0].step == 1
    assert monitor.events[0].figures["bad_batch_idx"] == 5


@pytest.mark.filterwarnings("ignore:.*returned `None`")  # Lightning says it once in a process.
def test_training_step_without_a_loss_is_no_skip():
    def training_step(self, batch, batch_idx):
        return self.loss(batch) if batch_idx % 2 else None

    module = make_module(training_step=training_step)
    monitor, _ = run([1] * 6, module=module, plugin=make_plugin(init_scale=1024.0))
    assert monitor.health.totals.steps == {0: 3}
    assert skipped(monitor) == []


def test_bf16_run_watches_losses():
    with warned():
        monitor, _ = run([1, NAN, 1], plugin=make_plugin(precision="bf16-mixed"))
    assert kinds(monitor)[0] == "non_finite_loss"
    assert "Without a scaler the step was taken all the same" in told(monitor, "non_finite_loss")
    assert monitor.health.totals.last_scale is None
    assert monitor.health.totals.steps == {0: 3}


def test_bf16_run_watches_gradients():
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * INF

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return Explode.apply(loss) if batch_idx == 2 else loss

    module = make_module(training_step=training_step)
    with warned():
        monitor, _ = run([1, 1, 1], module=module, plugin=make_plugin(precision="bf16-mixed"))
    assert kinds(monitor)[0] == "non_finite_gradients"
    assert monitor.events[0].figures["culprit"] == "first.weight"


def test_pure_fp16_without_a_scaler_is_told():
    from lightning.pytorch.plugins import HalfPrecision

    with warned():
        monitor, _ = run([1], plugin=HalfPrecision("16-true"))
    assert kinds(monitor) == ["no_scaler_in_fp16"]


@pytest.mark.parametrize("clip", [None, 0.5], ids=["unclipped", "clipped"])
def test_norm_is_that_of_unscaled_gradients_before_clipping(clip):
    monitor, _ = run(
        [1, 2, 3],
        plugin=make_plugin(init_scale=256.0),
        gradient_clip_val=clip,
        gradient_clip_algorithm="norm",
    )
    # Both layers are the identity: 4 + 2 weights and biases each, all with the amplitude as gradient.
    norms = [point.grad_norm for point in monitor.health.history.points]
    assert norms == pytest.approx(
        [12**0.5, 2 * 12**0.5, 3 * 12**0.5], rel=1e-2
    )  # FP16 weights move a little.


def test_norm_of_a_fused_optimizer_is_unscaled_too():
    monitor, _ = run([1], module=make_module(optimizer=fused), plugin=make_plugin(init_scale=256.0))
    assert monitor.health.history.points[0].grad_norm == pytest.approx(12**0.5, rel=1e-3)


def test_quiet_steps_take_no_norm_and_are_counted():
    monitor, _ = run([1] * 10, GradScalerMonitor(every_n_steps=4), plugin=make_plugin(init_scale=256.0))
    taken = [point.step for point in monitor.health.history.points if point.grad_norm is not None]
    assert taken == [0, 4, 8]
    assert monitor.health.totals.steps == {0: 10}


class Logger:
    """Keeps what it is told."""

    def __init__(self):
        self.rows = []

    def make(self):
        from lightning.pytorch.loggers.logger import DummyLogger

        rows = self.rows

        class Keep(DummyLogger):
            def log_metrics(self, metrics, step=None):
                rows.append((step, metrics))

        return Keep()


def test_logged_keys():
    logger = Logger()
    run(
        [1] * 7 + [500] + [1] * 2,
        GradScalerMonitor(every_n_steps=5),
        plugin=make_plugin(init_scale=1024.0),
        logger=logger.make(),
    )
    rows = [(step, row) for step, row in logger.rows if any(key.startswith("memprec/") for key in row)]
    # Steps 0 and 5 by schedule; the skip of batch 7 when batch 8 has shown that it was a single one.
    assert [step for step, _ in rows] == [0, 5, 8]
    assert set(rows[0][1]) == {
        f"memprec/grad_scaler/{name}"
        for name in (
            "scale", "skipped_count", "skip_rate_fraction", "growth_count", "grad_norm", "param_norm_max",
            "loss_is_finite", "batch_idx", "event_count",
        )
    }  # fmt: skip
    assert rows[0][1]["memprec/grad_scaler/param_norm_max"] == pytest.approx(2**0.5)
    assert rows[2][1]["memprec/grad_scaler/skipped_count"] == 1
    for key in rows[0][1]:
        assert f"`{key}`" in GradScalerMonitor.__doc__


def test_report_and_plot(tmp_path):
    path = tmp_path / "deep" / "report.json"
    monitor, _ = run([4] * 5, GradScalerMonitor(every_n_steps=1, report_path=path))
    report = json.loads(path.read_text())
    assert report["summary"] == monitor.summary()
    assert [event["kind"] for event in report["events"]] == ["calibration"]
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    figure, axes = monitor.plot()
    # The third mark is at the third skipped step.
    marks = next(line for line in axes.lines if line.get_label() == "skipped step")
    assert list(marks.get_xdata()) == [0, 1, 2]
    assert list(marks.get_ydata()) == [65536, 32768, 16384]
    again, same = monitor.plot(axes)
    assert again is figure
    assert same is axes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be at least 1, got 0"),
        ({"window": 0}, "`window` must be at least 1, got 0"),
        ({"min_scale": 0.0}, "`min_scale` must be a finite number above 0, got 0.0"),
        ({"low_scale_threshold": INF}, "`low_scale_threshold` must be a finite number"),
        ({"on_collapse": "cry"}, "`on_collapse` must be 'warn', 'stop' or 'raise', got 'cry'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        GradScalerMonitor(**options)


def test_a_fault_of_the_monitor_is_told_once_and_the_run_goes_on(monkeypatch):
    monitor = GradScalerMonitor()
    monkeypatch.setattr(type(monitor.health), "observe", lambda self, record: 1 / 0)
    with pytest.warns(UserWarning, match="failed and watches no longer: ZeroDivisionError") as caught:
        _, trainer = run([1] * 4, monitor)
    assert trainer.global_step == 4
    assert sum("watches no longer" in str(warning.message) for warning in caught) == 1


def test_a_report_that_cannot_be_written_is_told_as_that(tmp_path):
    (tmp_path / "file").touch()
    monitor = GradScalerMonitor(report_path=tmp_path / "file" / "report.json")
    with pytest.warns(UserWarning, match="could not write its report: .*Pass a `report_path`") as caught:
        run([1] * 2, monitor, plugin=make_plugin(init_scale=2.0))
    assert not any("watches no longer" in str(warning.message) for warning in caught)
    assert monitor.health.totals.steps == {0: 2}


def test_interrupted_run_keeps_all_its_steps():
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise KeyboardInterrupt
        return self.loss(batch)

    monitor = GradScalerMonitor()
    module = make_module(optimizer=fused, training_step=training_step)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        run([1] * 5, monitor, module, plugin=make_plugin(init_scale=2.0))
    assert monitor.health.totals.steps == {0: 3}


class Other(GradScalerMonitor):
    """Of another class, and so with a state of its own."""


def test_two_monitors_are_refused():
    trainer = make_trainer(GradScalerMonitor(), Other(), plugins=[make_plugin()])
    with pytest.raises(Exception, match="takes one GradScalerMonitor") as caught:
        trainer.fit(make_module(), loader([1]))
    assert type(caught.value).__name__ == "MisconfigurationException"


def test_a_clipping_of_somebody_else_is_called():
    plugin, called = make_plugin(init_scale=2.0), []

    def clip_grad_by_norm(optimizer, clip_val):
        called.append(clip_val)

    plugin.clip_grad_by_norm = clip_grad_by_norm
    monitor, _ = run([1] * 2, plugin=plugin, gradient_clip_val=0.5)
    assert called == [0.5, 0.5]
    assert monitor.health.history.points[0].grad_norm == pytest.approx(12**0.5, rel=1e-3)
    assert plugin.clip_grad_by_norm is clip_grad_by_norm


def test_plot_and_summary_before_a_run():
    pytest.importorskip("matplotlib").use("agg")
    monitor = GradScalerMonitor()
    figure, axes = monitor.plot()
    assert axes.figure is figure
    assert not axes.lines
    assert monitor.summary() == "No optimizer step was observed."


def test_second_fit_starts_afresh():
    monitor = GradScalerMonitor()
    run([4] * 5, monitor)
    run([1] * 3, monitor, plugin=make_plugin(init_scale=2.0))
    assert monitor.health.totals.steps == {0: 3}
    assert kinds(monitor) == []


@pytest.mark.parametrize("name", NAMESPACES)
def test_runs_with_a_namespace_of_its_own(name):
    monitor, trainer = run([1] * 3, module=make_module(name), name=name)
    assert trainer.global_step == 3
    assert monitor.health.totals.steps == {0: 3}


def test_validation_inside_fit_does_not_disturb():
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    module = make_module(validation_step=validation_step)
    monitor = GradScalerMonitor(every_n_steps=1)
    trainer = make_trainer(monitor, plugins=[make_plugin(init_scale=256.0)], max_epochs=2)
    trainer.fit(module, loader([1] * 3), loader([1] * 2))
    assert monitor.health.totals.steps == {0: 6}
    assert kinds(monitor) == []


def test_what_the_page_shows_for_a_cpu_has_a_scaler():
    pytest.importorskip("matplotlib").use("agg")
    page = (Path(__file__).parents[2] / "docs" / "grad-scaler.md").read_text()
    code = page.split("## Try it without a GPU")[1].split("```python")[1].split("```")[0]
    names = {}
    exec(compile(code, "block", "exec"), names)
    assert names["monitor"].health.totals.last_scale is not None
    assert names["monitor"].health.totals.steps == {0: 4}
    assert names["axes"].figure is names["figure"]


def test_page_names_every_diagnosis_option_and_key():
    page = (Path(__file__).parents[2] / "docs" / "grad-scaler.md").read_text()
    for kind, diagnosis in DIAGNOSES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind}`")]
        assert ("⚠" in row) is (diagnosis.severity == "warning")
    for name in inspect.signature(GradScalerMonitor).parameters:
        assert f"| `{name}` |" in page


def test_collapse_error_survives_pickling():
    error = ScalerCollapseError("gone", Event("collapse", "warning", 1, 2, "gone", {"scale": 0.0}))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.event) == (str(error), error.event)


@pytest.mark.slow
def test_example_finds_what_was_put_into_it(capsys, tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    path = Path(__file__).parents[2] / "examples" / "grad_scaler_monitor.py"
    spec = importlib.util.spec_from_file_location("grad_scaler_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with warned():
        monitor = example.main(str(tmp_path / "figure.svg"))
    assert kinds(monitor)[0] == "calibration"
    batches = [e.figures["skipped_batch_idx"] for e in monitor.events if e.kind == "isolated_skip"]
    assert example.OUTLIER in batches
    (exploding,) = [event for event in monitor.events if event.kind == "exploding"]
    assert exploding.step > example.EXPLODES
    # Stopped before the end.
    assert kinds(monitor)[-1] == "collapse"
    assert sum(monitor.health.totals.steps.values()) < example.STEPS
    assert (tmp_path / "figure.svg").stat().st_size > 1000
    assert "exploding" in capsys.readouterr().out
