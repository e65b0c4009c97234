"""What `MemoryEstimate.plot` draws, read back from the axes."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from lightning_memprec import estimate_memory

matplotlib = pytest.importorskip("matplotlib")
MIB = 1024**2


@pytest.fixture(scope="module")
def estimate():
    def build():
        return nn.Sequential(*[nn.Sequential(nn.Linear(300, 300), nn.ReLU()) for _ in range(3)])

    return estimate_memory(build, torch.empty(500, 300), optimizer=torch.optim.AdamW, device="cpu")


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().subplots()


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_timeline_stacks_the_parts_and_marks_the_peak(estimate, axes):
    figure, ax = estimate.plot(axes)
    assert ax is axes
    assert figure is axes.figure
    names = {name for point in estimate.timeline for name, size in point.breakdown.items() if size}
    assert set(labels(ax)) == names
    assert len(ax.collections) == len(names)
    peak = estimate.breakdown.total_bytes / MIB
    (marker,) = [line for line in ax.lines if line.get_marker() == "o"]
    assert marker.get_ydata() == [pytest.approx(peak)]
    tops = [path.vertices[:, 1].max() for area in ax.collections for path in area.get_paths()]
    assert max(tops) == pytest.approx(peak)
    assert ax.texts[0].get_text().startswith(f"peak {peak:.2f} MiB")


def test_a_measured_peak_is_a_line_over_the_timeline(estimate, axes):
    estimate.plot(axes, measured=[3 * MIB, 5 * MIB])
    assert "measured 5.00 MiB" in labels(axes)


def test_modules_are_bars_that_add_up(estimate, axes):
    estimate.plot(axes, kind="modules")
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert "*.* (x 3)" in names
    total = sum(bar.get_width() for bar in axes.patches)
    assert total == pytest.approx(estimate.breakdown.total_bytes / MIB)


@pytest.mark.parametrize(("measured", "error"), [(0.5, "+100.0 %"), (1.0, "+0.0 %"), (2.0, "-50.0 %")])
def test_predicted_beside_measured_says_the_error(estimate, axes, measured, error):
    peak = estimate.peak_allocated_bytes
    estimate.plot(axes, kind="measured", measured=int(measured * peak))
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(
        [peak / MIB, int(measured * peak) / MIB]
    )
    assert axes.get_title() == f"error of the predicted peak: {error}"


def test_steps_are_predicted_one_by_one(estimate, axes):
    estimate.plot(axes, kind="measured", measured=[MIB, 2 * MIB, 2 * MIB])
    predicted, measured = axes.lines
    peaks = {
        step: max(p.peak_allocated_bytes for p in estimate.phases if p.step == step) / MIB for step in (0, 1)
    }
    assert list(predicted.get_ydata()) == pytest.approx([peaks[0], peaks[1], peaks[1]])
    assert list(measured.get_ydata()) == [1, 2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kind": "pie"}, "`kind` must be one of"), ({"kind": "measured"}, "needs `measured`")],
    ids=["kind", "measured"],
)
def test_wrong_arguments_are_named(estimate, axes, options, message):
    with pytest.raises(ValueError, match=message):
        estimate.plot(axes, **options)


def test_a_new_figure_and_an_empty_timeline(estimate):
    from dataclasses import replace

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, _ = replace(estimate, timeline=(), by_module=()).plot()
    pyplot.close(figure)
    figure, _ = replace(estimate, timeline=(), by_module=()).plot(kind="modules")
    pyplot.close(figure)
    figure, _ = estimate.plot()
    figure.canvas.draw()
    pyplot.close(figure)


def test_without_matplotlib_the_extra_is_named(estimate, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-memprec\[plot\]"):
        estimate.plot()
