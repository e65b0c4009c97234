"""Bytes per parameter of training with master weights, by phase, beside FP32 in the same process.

Counted from the allocations that the profiler records in a real Trainer run on the CPU, of a perceptron whose
activations are next to nothing. "backward" is autograd's part; what the plugin does after it belongs to "step".

Run it as ``python -m benchmarks.master_memory`` (100 million parameters, about a minute and 3 GB).
"""

from __future__ import annotations

import argparse
import logging
import warnings

from benchmarks._machine import describe_machine
from tests.master_weights.memory_run import PHASES, bytes_per_parameter

CASES = {
    "FP32": (None, {}),
    "bf16-master": ({}, {}),
    "  clipping the norm": ({}, {"gradient_clip_val": 1.0}),
    "  accumulating": ({}, {"accumulate_grad_batches": 2}),
    "  low_memory": ({"low_memory": True}, {}),
    "  low_memory, clipping": ({"low_memory": True}, {"gradient_clip_val": 1.0}),
    "  step_in_backward": ({"step_in_backward": True}, {}),
}


def main(layers=96, width=1024):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(describe_machine())
    print(
        f"{layers * width * width / 1e6:.1f} M parameters in {layers} layers, bytes per parameter, largest of a phase"
    )
    for foreach in (False, True):
        print(f"\n{f'AdamW(foreach={foreach})':24s}" + "".join(f"{phase:>10s}" for phase in PHASES))
        for name, (plugin, trainer_options) in CASES.items():
            taken = bytes_per_parameter(layers, width, {"foreach": foreach}, plugin, **trainer_options)
            print(f"{name:24s}" + "".join(f"{taken[phase]:10.2f}" for phase in PHASES), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=1024)
    main(**vars(parser.parse_args()))
