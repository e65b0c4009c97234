from __future__ import annotations

import io
from dataclasses import replace

import pytest

from lightning_memprec.memory.result import (
    Assumption,
    Breakdown,
    HostMemory,
    LargestBatch,
    MemoryEstimate,
    ModuleMemory,
    PhasePeak,
    Remedy,
)
from lightning_memprec.report import format_estimate, judge
from lightning_memprec.report.content import overflow_message

GIB = 1024**3


def make_estimate(**changes):
    parts = Breakdown(
        parameters_bytes=2 * GIB,
        gradients_bytes=2 * GIB,
        optimizer_states_bytes=4 * GIB,
        activations_bytes=3 * GIB,
    )
    values = {
        "peak_allocated_bytes": parts.total_bytes,
        "peak_reserved_bytes": parts.total_bytes + GIB,
        "minimum_reserved_bytes": parts.total_bytes + GIB // 2,
        "outside_allocator_bytes": GIB // 2,
        "breakdown": parts,
        "peak_phase": PhasePeak("backward", 1, parts.total_bytes),
        "phases": (PhasePeak("forward", 0, 5 * GIB), PhasePeak("backward", 1, 11 * GIB)),
        "by_module": (ModuleMemory("layers.0.attention", "Attention", Breakdown(activations_bytes=3 * GIB)),),
        "timeline": (),
        "assumptions": (Assumption("context", "A context of a T4.", "", GIB // 2),),
        "device": "T4-16GB",
        "precision": "bf16-mixed",
        "steps": 2,
        "trainable_parameters": 10**6,
        "total_parameters": 7 * 10**9,
    }
    return MemoryEstimate(**{**values, **changes})


REMEDIES = (
    Remedy("big", "an 8-bit optimizer", "bnb.AdamW8bit(...)", 9 * GIB, 3 * GIB, True, cost="rounded states"),
    Remedy("small", "a smaller batch", "batch_size=1", 11 * GIB, GIB, False, basis="modelled"),
)


def test_report_shows_every_part_its_share_and_the_verdict():
    estimate = make_estimate()
    verdict = judge(estimate.minimum_device_bytes, 10 * GIB, safety_margin=0.05)
    text = format_estimate(estimate, verdict, REMEDIES, ["A note."])
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "Memory preflight: 7B parameters (1M trainable), bf16-mixed on T4-16GB"
    for start in (
        "parameters 2.00 GiB 16.7%",
        "optimizer states 4.00 GiB 33.3%",
        "allocator reserve 512.00 MiB 4.2%",
        "context and libraries 512.00 MiB 4.2%",
        "needed 12.00 GiB",
        "offered 10.00 GiB",
        "headroom -2.00 GiB",
        "DOES NOT FIT: 2.00 GiB too much.",
        "Peak: backward, step 2 of 2.",
        "first step 5.00 GiB",
        "later steps 11.00 GiB",
        "layers.0.attention (Attention) 3.00 GiB activations",
        "1. an 8-bit optimizer: 9.00 GiB, fits; cost: rounded states",
        "bnb.AdamW8bit(...)",
        "2. a smaller batch: 11.00 GiB, not enough alone, modelled",
        "- A note.",
        "- A context of a T4. (512.00 MiB)",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert "buffers" not in text
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 88


def test_parts_add_up_to_what_is_needed():
    from lightning_memprec.report.content import part_rows

    estimate = make_estimate()
    assert sum(size for _, size in part_rows(estimate)) == estimate.minimum_device_bytes


def test_report_without_verdict_has_no_capacity():
    text = format_estimate(make_estimate())
    assert "needed" in text
    assert "offered" not in text


@pytest.mark.parametrize(
    ("need", "capacity", "margin", "status", "sentence"),
    [
        (90, 100, 0.1, "fits", "FITS: 10 B to spare."),
        (91, 100, 0.1, "tight", "TIGHT: it fits only inside the safety margin, with 9 B to spare."),
        (100, 100, 0.1, "tight", "TIGHT"),
        (101, 100, 0.0, "overflow", "DOES NOT FIT: 1 B too much."),
        (10, None, 0.0, "undetermined", "UNDETERMINED: the capacity of the device is unknown."),
        (None, 10, 0.0, "undetermined", "UNDETERMINED"),
    ],
)
def test_verdict(need, capacity, margin, status, sentence):
    from lightning_memprec.report.content import verdict_sentence

    verdict = judge(need, capacity, safety_margin=margin)
    assert verdict.status == status
    assert verdict_sentence(verdict).startswith(sentence)


@pytest.mark.parametrize("margin", [-0.1, 1.0, 7])
def test_margin_out_of_range(margin):
    with pytest.raises(ValueError, match="safety_margin"):
        judge(1, 1, safety_margin=margin)


@pytest.mark.parametrize(
    ("remedies", "advice"),
    [
        (REMEDIES, "Try an 8-bit optimizer with `bnb.AdamW8bit(...)` (9.00 GiB)."),
        (
            REMEDIES[1:],
            "No change that was tried is enough; the largest saving: a smaller batch with `batch_size=1`",
        ),
        ((), "Reduce the batch size or use a larger device."),
    ],
)
def test_refusal_names_need_capacity_largest_part_and_advice(remedies, advice):
    estimate = make_estimate()
    verdict = judge(estimate.minimum_device_bytes, 10 * GIB, safety_margin=0.05)
    message = overflow_message(estimate, verdict, remedies, "`T4-16GB`")
    start = (
        "Training needs about 12.00 GiB on each device but `T4-16GB` offers 10.00 GiB (`safety_margin=0.05`)."
    )
    assert message.startswith(start)
    assert "Largest part: optimizer states (4.00 GiB)." in message
    assert advice in message


def test_rich_report_says_the_same():
    from rich.console import Console

    from lightning_memprec.report.rich_table import render_estimate

    estimate = make_estimate(by_module=(ModuleMemory("a[b]", "T[x]", Breakdown(activations_bytes=GIB)),))
    verdict = judge(estimate.minimum_device_bytes, 10 * GIB, safety_margin=0.05)
    console = Console(file=io.StringIO(), width=100)
    console.print(render_estimate(estimate, verdict, REMEDIES, ["A note [x]."]))
    text = console.file.getvalue()
    for part in (
        "optimizer states",
        "33.3%",
        "DOES NOT FIT",
        "a[b] (T[x])",
        "bnb.AdamW8bit(...)",
        "A note [x].",
    ):
        assert part in text


def test_margin_says_what_it_rests_on():
    estimate = make_estimate()
    verdict = judge(estimate.minimum_device_bytes, 20 * GIB, safety_margin=0.08)
    assert "The margin of 8 % is for what the estimate misses." in flat(format_estimate(estimate, verdict))
    for silent in (
        format_estimate(make_estimate(device="cpu"), verdict),
        format_estimate(estimate, judge(1, None)),
        format_estimate(estimate),
    ):
        assert "The margin of" not in flat(silent)


def flat(text):
    return " ".join(text.split())


PHASES = (
    PhasePeak("setup", -1, GIB, 2 * GIB),
    PhasePeak("sanity_validation", -1, 3 * GIB),
    PhasePeak("forward", 0, 4 * GIB, 5 * GIB),
    PhasePeak("optimizer_step", 0, 6 * GIB, 7 * GIB),
    PhasePeak("forward", 1, 9 * GIB, 10 * GIB),
    PhasePeak("optimizer_step", 1, 8 * GIB, 10 * GIB),
    PhasePeak("validation", 1, 11 * GIB, 12 * GIB),
)


@pytest.mark.parametrize("look", ["plain", "rich"])
def test_phases_and_the_machine_around_are_shown(look):
    host = HostMemory(GIB, 2 * GIB, 4 * GIB, 3 * GIB, GIB, ranks_per_node=8)
    estimate = make_estimate(phases=PHASES, peak_phase=PHASES[-1], host=host)
    if look == "plain":
        text = format_estimate(estimate)
    else:
        from rich.console import Console

        from lightning_memprec.report.rich_table import render_estimate

        console = Console(file=io.StringIO(), width=200)
        console.print(render_estimate(estimate))
        text = console.file.getvalue()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    phases = [
        "set-up 1.00 GiB 2.00 GiB",
        "sanity validation 3.00 GiB",
        "first step 6.00 GiB 7.00 GiB",
        "later steps 9.00 GiB 10.00 GiB",
        "optimizer step of these 8.00 GiB 10.00 GiB",
        "validation 11.00 GiB 12.00 GiB",
    ]
    first = lines.index(phases[0])
    assert lines[first : first + len(phases)] == phases
    assert "Peak: validation." in flat(text)
    assert "A checkpoint takes 3.00 GiB on disk, weights only 1.00 GiB." in lines
    assert "1.00 GiB on each of 8 ranks until the weights are on the device" in flat(text)


def test_refusal_for_validation_says_so():
    estimate = make_estimate(phases=PHASES, peak_phase=PHASES[-1])
    verdict = judge(estimate.minimum_device_bytes, 10 * GIB)
    message = overflow_message(estimate, verdict, (), "`T4-16GB`")
    assert "The peak is in validation; the training steps allocate at most 9.00 GiB." in message
    assert "validation" not in overflow_message(make_estimate(), verdict, (), "`T4-16GB`")


@pytest.mark.parametrize(
    ("largest", "sentence"),
    [
        (
            LargestBatch(5, 9 * GIB, 8, 6, 4),
            "Largest batch that fits: 5, where the run needs 9.00 GiB, and 6 does not fit (traced with 4 sizes; "
            "this run has 8).",
        ),
        (LargestBatch(64, 9 * GIB, 8, None, 3), "Largest batch that fits: at least 64, where the run needs"),
        (None, ""),
    ],
)
def test_largest_batch_is_a_line_of_the_report(largest, sentence):
    verdict = replace(judge(12 * GIB, 10 * GIB), largest_batch=largest)
    text = format_estimate(make_estimate(), verdict)
    assert sentence in flat(text)
    assert ("Largest batch" in text) == bool(sentence)
    assert max(map(len, text.splitlines())) <= 88
