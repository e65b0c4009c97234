"""Settings of the CUDA caching allocator, compared with PyTorch's own reading of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_memprec.memory.allocator_config import AllocatorConfig

MIB = 2**20
SETTINGS = "PYTORCH_ALLOC_CONF"


def read(text):
    return AllocatorConfig.from_environment({SETTINGS: text})


@pytest.fixture
def torch_reads():
    """PyTorch's own parser; its keys for CUDA are known to CUDA builds only."""
    parse = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if parse is None or torch.version.cuda is None:
        pytest.skip("needs a CUDA build of torch 2.10 or later")
    yield parse
    # All settings that PyTorch does not reset by itself.
    parse(
        "expandable_segments:False,large_segment_size_mb:20,max_non_split_rounding_mb:20,per_process_memory_fraction:1.0"
    )
    parse("")


@pytest.fixture
def torch_divisions(torch_reads):
    """Return PyTorch's divisions of all intervals after it read a value."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    function = getattr(library, name, None)
    if function is None:
        pytest.skip("this torch does not export its divisions")
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_size_t]

    def divisions(value):
        torch_reads(f"roundup_power2_divisions:{value}")
        return tuple(function(MIB << interval) for interval in range(16))

    return divisions


def test_defaults_are_those_of_an_empty_environment():
    assert AllocatorConfig.from_environment({}) == AllocatorConfig() == read("")


def test_every_setting_is_read():
    config = read(
        "large_segment_size_mb:32, max_split_size_mb:64, max_non_split_rounding_mb:40,"
        "roundup_power2_divisions:8, garbage_collection_threshold:0.8, expandable_segments:True,"
        "per_process_memory_fraction:0.5, backend:cudaMallocAsync"
    )
    assert config == AllocatorConfig(
        max_split_size_bytes=64 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        roundup_power2_divisions=(8,) * 16,
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        large_segment_bytes=32 * MIB,
        per_process_memory_fraction=0.5,
        backend="cudaMallocAsync",
    )


def test_rounding_of_unsplit_blocks_defaults_to_the_large_segment_wherever_that_stands():
    assert read("max_split_size_mb:50,large_segment_size_mb:40").max_non_split_rounding_bytes == 40 * MIB


def test_later_value_of_a_key_counts():
    assert read("max_split_size_mb:50,max_split_size_mb:60").max_split_size_bytes == 60 * MIB


@pytest.mark.parametrize(
    ("environ", "split"),
    [
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:30"}, 30),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:40"}, 40),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:40", "PYTORCH_ALLOC_CONF": "max_split_size_mb:30"},
            40,
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "max_split_size_mb:30"}, None),
    ],
    ids=["new name", "old name", "both", "old name empty"],
)
def test_old_name_hides_the_new_one(environ, split):
    config = AllocatorConfig.from_environment(environ)
    assert config.max_split_size_bytes == (split and split * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("old", ["roundup_power2_divisions:8", ""])
def test_torch_too_lets_the_old_name_hide_the_new_one(old, torch_reads):
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch cannot tell the settings it read")
    environ = {"PYTORCH_CUDA_ALLOC_CONF": old, "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch._C._accelerator_getAllocatorSettings())"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == old


VALID_DIVISIONS = [
    "1",
    "4",
    "[256:1,512:2,>:4]",
    "[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "[>:4]",
    "[2:0,>:16]",
    "[256:8]",
    "[512:2,256:4,>:8]",
    "[>:8,256:4]",
    "[65536:4]",
]


@pytest.mark.parametrize("value", VALID_DIVISIONS)
def test_divisions_are_those_of_torch(value, torch_divisions):
    assert read(f"roundup_power2_divisions:{value}").roundup_power2_divisions == torch_divisions(value)


@pytest.mark.parametrize(
    ("size_mib", "divisions"), [(0.001, 1), (128, 1), (300, 1), (512, 2), (1023, 2), (1024, 4), (2**20, 4)]
)
def test_divisions_of_a_size_are_those_of_its_interval(size_mib, divisions):
    assert read("roundup_power2_divisions:[256:1,512:2,>:4]").divisions_for(int(size_mib * MIB)) == divisions


HARMLESS = [
    "release_lock_on_cudamalloc:True",
    "pinned_use_cuda_host_register:True",
    "pinned_num_register_threads:8",
    "pinned_use_background_threads:False",
    "pinned_reserve_segment_size_mb:64",
    "pinned_max_round_threshold_mb:64",
    "pinned_max_cached_size_mb:64",
    "graph_capture_record_stream_reuse:True",
    "pinned_free_catch_all:False",
    "throw_on_cudamalloc_oom:True",
]


@pytest.mark.parametrize("entry", HARMLESS)
def test_setting_without_effect_on_sizes_is_accepted(entry):
    assert read(entry) == AllocatorConfig()


INVALID = {
    "max_split_size_mb:19": "Write a whole number of MiB, 20 or more",
    "max_split_size_mb:many": "cannot be 'many'",
    "large_segment_size_mb:10": "11 or more",
    "large_segment_size_mb:40,max_split_size_mb:30": "40 or more",
    "max_non_split_rounding_mb:19": "20 or more",
    "garbage_collection_threshold:1.0": "between 0 and 1, both excluded",
    "garbage_collection_threshold:0": "'garbage_collection_threshold' cannot be '0'",
    "garbage_collection_threshold:high": "between 0 and 1",
    "per_process_memory_fraction:1.5": "from 0 to 1",
    "expandable_segments:true": "Write 'True' or 'False'",
    "backend:jemalloc": "'native' or 'cudaMallocAsync'",
    "roundup_power2_divisions:3": "a power of two",
    "roundup_power2_divisions:0": "a power of two",
    "roundup_power2_divisions:[300:4]": "a power of two",
    "max_split:30": "Unknown key 'max_split' with value '30'.*Use one of: backend, expandable_segments",
    "max_split_size_mb": "Cannot read 'max_split_size_mb'",
    "roundup_power2_divisions:[256:1": "Write `key:value` pairs",
}


@pytest.mark.parametrize(("text", "message"), INVALID.items(), ids=INVALID)
def test_error_says_what_is_accepted(text, message):
    with pytest.raises(ValueError, match=message):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        *INVALID,
        *HARMLESS,
        *(f"roundup_power2_divisions:{value}" for value in VALID_DIVISIONS),
        "large_segment_size_mb:11",
        "max_split_size_mb:20",
        "large_segment_size_mb:12,max_split_size_mb:15",
        "per_process_memory_fraction:0",
        "garbage_collection_threshold:0.99",
        "backend:native",
        "max_split_size_mb:100,",
    ],
)
def test_torch_accepts_the_same(text, torch_reads):
    torch_reads("large_segment_size_mb:20")
    try:
        read(text)
    except ValueError:
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            torch_reads(text)
    else:
        try:
            torch_reads(text)
        except ValueError as error:
            if "Unrecognized key" in str(error):
                pytest.skip("this torch does not know the key yet")
            raise
