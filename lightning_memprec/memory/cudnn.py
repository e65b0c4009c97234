"""Ask the installed cuDNN what a convolution would need on a device that this machine does not have.

cuDNN picks the algorithm of a convolution by heuristics that read shapes, layouts and the kind of device, and
nothing of the device itself. Since version 9.8 it takes the device as a description
(``CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR``), so that a CUDA build of torch on a laptop can be asked what it would
do on a data-center GPU. Names and numbers follow ``cudnn_graph.h``.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Convolution", "CudnnFlags", "CudnnHeuristics", "Kind", "Workspace"]

Kind = Literal["forward", "data gradient", "weight gradient"]

_FIRST_VERSION = 90800  # Device descriptions, `@since cuDNN 9.8.0`.
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}  # cudnnDataType_t
_COMPUTE_FLOAT, _COMPUTE_DOUBLE = 0, 1

# cudnnBackendAttributeType_t.
_DATA_TYPE, _INT64, _FLOAT, _CONVOLUTION_MODE, _HEUR_MODE, _NOTE, _DESCRIPTOR, _CHAR = (
    1,
    3,
    4,
    7,
    8,
    11,
    15,
    24,
)
_DOUBLE = 5
# cudnnBackendDescriptorType_t.
_CONVOLUTION, _ENGINE, _ENGINE_CONFIG, _ENGINE_HEURISTICS, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 15, 17, 38
# Descriptor of each operation, and its attributes: alpha, beta, convolution, weight, data, output.
_OPERATIONS: dict[Kind, tuple[int, tuple[int, ...]]] = {
    "forward": (10, (700, 701, 702, 703, 704, 705)),
    "weight gradient": (11, (712, 713, 714, 715, 716, 717)),
    "data gradient": (12, (706, 707, 708, 709, 710, 711)),
}
_CROSS_CORRELATION, _HEUR_MODE_INSTANT = 1, 0
_NOTE_TENSOR_CORE, _NOTE_DOWN_CONVERTS, _NOTE_NOT_DETERMINISTIC = 0, 1, 4  # cudnnBackendNumericalNote_t
_ALIGNMENT = 32  # The most that torch reports (`getAlignment`); blocks of its allocator have 512.

# Every field has to be there, but the answers to 250 convolutions of four networks changed with the compute
# capability alone, not with clocks, caches, limits, memory or the number of multiprocessors.
_DEVICE_FIELDS: dict[str, Any] = {
    "deviceName": "", "driverVer": 13000, "cudaDeviceId": 0, "pciDeviceId": 0, "isTccDriver": 0,
    "multiProcessorCount": 100, "totalGlobalMem": 2**36, "l2CacheSize": 2**25, "smClockRateKHz": 1_500_000,
    "memClockRateKHz": 1_500_000, "warpSize": 32, "regsPerBlock": 65536, "maxRegistersPerSM": 65536,
    "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 1536, "maxCtasPerSM": 16, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 101376, "reservedSharedMemoryPerBlock": 1024, "supportCoopLaunch": 1,
    "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64],
}  # fmt: skip


@dataclass(frozen=True)
class Convolution:
    """One convolution, as cuDNN sees it.

    Args:
        kind: Which of its three products is computed.
        data: Shape and strides of the layer's input ``(batch, channels, *spatial)``, or of its gradient.
        weight: Shape and strides of the filter ``(out channels, in channels / groups, *kernel)``.
        output: Shape and strides of the layer's output, or of its gradient.
        stride: One number a spatial dimension; so are ``padding`` and ``dilation``.
        padding: On both sides.
        dilation: 1 is dense.
        dtype: Of all tensors.
    """

    kind: Kind
    data: tuple[tuple[int, ...], tuple[int, ...]]
    weight: tuple[tuple[int, ...], tuple[int, ...]]
    output: tuple[tuple[int, ...], tuple[int, ...]]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, kind: Kind, data: Tensor, weight: Tensor, output: Tensor, *geometry: Sequence[int]
    ) -> Convolution:
        """Describe a convolution of tensors; ``geometry`` is stride, padding and dilation."""
        first, second, third = ((tuple(t.shape), tuple(t.stride())) for t in (data, weight, output))
        dimensions = data.dim() - 2
        stride, padding, dilation = (tuple(g) * (dimensions if len(g) == 1 else 1) for g in geometry)
        return cls(kind, first, second, third, stride, padding, dilation, data.dtype)


class Workspace(NamedTuple):
    """What one convolution allocates while it runs.

    Args:
        size_bytes: Of the algorithm that torch tries first.
        smallest_bytes: Of the algorithm that needs least, among those that torch tries when memory is out.
    """

    size_bytes: int
    smallest_bytes: int


class CudnnFlags(NamedTuple):
    """Settings of torch that decide on engines.

    Args:
        benchmark: ``torch.backends.cudnn.benchmark``: the first call of each convolution has the largest workspace
            of all engines, which are timed. Which one wins is not known here: the calls that follow count as
            without.
        deterministic: Whether engines that are not deterministic are left out.
        allow_tf32: Whether float32 convolutions may use tensor cores, which is the default.
    """

    benchmark: bool = False
    deterministic: bool = False
    allow_tf32: bool = True

    @classmethod
    def current(cls) -> CudnnFlags:
        """Return the settings of this process."""
        backend = torch.backends.cudnn
        precision = getattr(getattr(backend, "conv", None), "fp32_precision", None)
        return cls(
            backend.benchmark,
            backend.deterministic or torch.are_deterministic_algorithms_enabled(),
            backend.allow_tf32 if precision is None else precision == "tf32",
        )


class _Refused(Exception):
    """A call to cuDNN did not succeed."""


class _Backend:
    """cuDNN's backend interface, with descriptors that are destroyed together."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._made: list[ctypes.c_void_p] = []

    def __enter__(self) -> _Backend:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in reversed(self._made):
            self._library.cudnnBackendDestroyDescriptor(descriptor)

    def _call(self, name: str, *args: Any) -> None:
        if getattr(self._library, name)(*args) != 0:
            raise _Refused(name)

    def make(self, kind: int, attributes: Sequence[tuple[int, int, Any]] = (), *, final: bool = True) -> Any:
        """Make a descriptor; each attribute is ``(name, type, ctypes array)``."""
        descriptor = ctypes.c_void_p()
        self._call("cudnnBackendCreateDescriptor", kind, ctypes.byref(descriptor))
        self._made.append(descriptor)
        for name, value_type, values in attributes:
            count = ctypes.c_int64(len(values))
            self._call("cudnnBackendSetAttribute", descriptor, name, value_type, count, values)
        if final:
            self._call("cudnnBackendFinalize", descriptor)
        return descriptor

    def get(self, descriptor: Any, name: int, value_type: int, values: Any) -> int:
        """Read an attribute into ``values``; return how many there are."""
        count = ctypes.c_int64()
        wanted = ctypes.c_int64(len(values) if values is not None else 0)
        self._call(
            "cudnnBackendGetAttribute", descriptor, name, value_type, wanted, ctypes.byref(count), values
        )
        return count.value


def _int64s(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _enum(value: int) -> Any:
    return (ctypes.c_int * 1)(value)


def _descriptors(*descriptors: Any) -> Any:
    return (ctypes.c_void_p * len(descriptors))(*(d.value for d in descriptors))


_NO_WORKSPACE = Workspace(0, 0)


class CudnnHeuristics:
    """The algorithms that cuDNN would choose on one kind of device.

    Args:
        capability: Compute capability of the device, such as ``(8, 0)``.
        flags: Settings of torch; default, its defaults.

    Attributes:
        version: Version of the installed cuDNN, or ``None`` if there is none that can be asked.
        unanswered: Convolutions that it did not answer for; they count as needing no workspace.

    Example:
        >>> heuristics = CudnnHeuristics((8, 0))
        >>> x, w = torch.empty(8, 64, 28, 28, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
        >>> convolution = Convolution.of("forward", x, w, x, [1, 1], [1, 1], [1, 1])
        >>> heuristics.version is None or heuristics.workspace(convolution).smallest_bytes >= 0
        True
    """

    def __init__(self, capability: tuple[int, int], flags: CudnnFlags = CudnnFlags()) -> None:  # noqa: B008
        self._flags = flags
        self._library = _library()
        self.version = None if self._library is None else _version(self._library)
        self.unanswered = 0
        self._device = {**_DEVICE_FIELDS, "deviceVer": 100 * capability[0] + 10 * capability[1]}
        self._known: dict[Convolution, Workspace] = {}

    def workspace(self, convolution: Convolution) -> Workspace:
        """Return the workspace of the algorithm that torch would run.

        Torch takes the first engine of cuDNN's instant heuristics that its settings allow, and the next one whenever
        an engine fails, for want of memory too (``get_configs_from_heuristics``, ``filterEngineConfigs`` and
        ``try_configs`` in aten/src/ATen/native/cudnn/Conv_v8.cpp): a convolution ends a run only if no engine finds
        memory. In benchmark mode it allocates the largest workspace once (``generate_and_filter_plans``).

        Args:
            convolution: What is computed.

        Returns:
            Bytes that live while the convolution runs; 0 if cuDNN cannot be asked.
        """
        if self._library is None:
            return _NO_WORKSPACE
        if convolution not in self._known:
            try:
                with _Backend(self._library) as backend:
                    sizes = self._sizes_bytes(backend, convolution)
                self._known[convolution] = Workspace(sizes[0], min(sizes))
                if self._flags.benchmark:
                    return Workspace(max(sizes), min(sizes))
            except _Refused:
                self.unanswered += 1
                self._known[convolution] = _NO_WORKSPACE
        return self._known[convolution]

    def _sizes_bytes(self, backend: _Backend, convolution: Convolution) -> list[int]:
        """Return the workspaces of all engines, in the order in which torch tries them."""
        text = json.dumps(self._device).encode()
        device = backend.make(_DEVICE, [(2702, _CHAR, ctypes.create_string_buffer(text, len(text)))])
        graph = _graph(backend, convolution)
        heuristics = backend.make(
            _ENGINE_HEURISTICS,
            [
                (201, _DESCRIPTOR, _descriptors(graph)),
                (200, _HEUR_MODE, _enum(_HEUR_MODE_INSTANT)),
                (204, _DESCRIPTOR, _descriptors(device)),
            ],
        )
        count = backend.get(heuristics, 202, _DESCRIPTOR, None)
        configs = [backend.make(_ENGINE_CONFIG, final=False) for _ in range(count)]
        found = backend.get(heuristics, 202, _DESCRIPTOR, _descriptors(*configs))
        excluded = self._excluded_notes(convolution.dtype)
        sizes = [_workspace_bytes(backend, c) for c in configs[:found] if not excluded & _notes(backend, c)]
        if not sizes:
            raise _Refused("no engine")
        return sizes

    def _excluded_notes(self, dtype: torch.dtype) -> set[int]:
        """Return what an engine must not do (``filterEngineConfigs``)."""
        excluded = {_NOTE_DOWN_CONVERTS}
        if self._flags.deterministic:
            excluded.add(_NOTE_NOT_DETERMINISTIC)
        if dtype is torch.float32 and not self._flags.allow_tf32:
            excluded.add(_NOTE_TENSOR_CORE)
        return excluded


def _graph(backend: _Backend, convolution: Convolution) -> Any:
    """Describe a graph of this one operation."""
    double = convolution.dtype is torch.float64
    spatial = [_int64s(g) for g in (convolution.dilation, convolution.stride, convolution.padding)]
    geometry = backend.make(
        _CONVOLUTION,
        [
            (100, _DATA_TYPE, _enum(_COMPUTE_DOUBLE if double else _COMPUTE_FLOAT)),
            (101, _CONVOLUTION_MODE, _enum(_CROSS_CORRELATION)),
            (106, _INT64, _int64s([len(convolution.stride)])),
            (102, _INT64, spatial[0]),
            (103, _INT64, spatial[1]),
            (104, _INT64, spatial[2]),
            (105, _INT64, spatial[2]),
        ],
    )
    tensors = []
    for number, layout in enumerate((convolution.weight, convolution.data, convolution.output)):
        attributes = [
            (901, _DATA_TYPE, _enum(_DTYPES[convolution.dtype])),
            (902, _INT64, _int64s(layout[0])),
            (903, _INT64, _int64s(layout[1])),
            (906, _INT64, _int64s([number + 1])),
            (900, _INT64, _int64s([_ALIGNMENT])),
        ]
        tensors.append(backend.make(_TENSOR, attributes))
    kind, (alpha, beta, *names) = _OPERATIONS[convolution.kind]
    scale_type, scale = (_DOUBLE, ctypes.c_double) if double else (_FLOAT, ctypes.c_float)
    attributes = [(alpha, scale_type, (scale * 1)(1.0)), (beta, scale_type, (scale * 1)(0.0))]
    for name, descriptor in zip(names, (geometry, *tensors), strict=True):
        attributes.append((name, _DESCRIPTOR, _descriptors(descriptor)))
    operation = backend.make(kind, attributes)
    return backend.make(_GRAPH, [(801, _DESCRIPTOR, _descriptors(operation))])


def _workspace_bytes(backend: _Backend, config: Any) -> int:
    size = _int64s([0])
    backend.get(config, 303, _INT64, size)
    return int(size[0])


def _notes(backend: _Backend, config: Any) -> set[int]:
    engine = backend.make(_ENGINE, final=False)
    backend.get(config, 300, _DESCRIPTOR, _descriptors(engine))
    notes = (ctypes.c_int * 32)()
    count = backend.get(engine, 1303, _NOTE, notes)
    return set(notes[:count])


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """Return cuDNN as torch loads it, or ``None`` if it is missing or too old to take a description."""
    try:
        library = ctypes.CDLL("libcudnn.so.9")
    except OSError:
        return None
    return library if _version(library) >= _FIRST_VERSION else None


def _version(library: ctypes.CDLL) -> int:
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return int(library.cudnnGetVersion())
