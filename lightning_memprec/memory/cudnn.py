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
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Convolution", "CudnnHeuristics", "Kind"]

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
_CROSS_CORRELATION, _HEUR_MODE_INSTANT, _NOTE_DOWN_CONVERTS = 1, 0, 1
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


class CudnnHeuristics:
    """The algorithms that cuDNN would choose on one kind of device.

    Args:
        capability: Compute capability of the device, such as ``(8, 0)``.

    Attributes:
        version: Version of the installed cuDNN, or ``None`` if there is none that can be asked.
        unanswered: Convolutions that it did not answer for; they count as needing no workspace.

    Example:
        >>> heuristics = CudnnHeuristics((8, 0))
        >>> x, w = torch.empty(8, 64, 28, 28, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
        >>> convolution = Convolution.of("forward", x, w, x, [1, 1], [1, 1], [1, 1])
        >>> heuristics.version is None or heuristics.workspace_bytes(convolution) >= 0
        True
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._library = _library()
        self.version = _version() if self._library is not None else None
        self.unanswered = 0
        self._device = {**_DEVICE_FIELDS, "deviceVer": 100 * capability[0] + 10 * capability[1]}
        self._known: dict[Convolution, int] = {}

    def workspace_bytes(self, convolution: Convolution) -> int:
        """Return the workspace of the algorithm that torch would run.

        Torch takes the first engine of cuDNN's instant heuristics that converts no input to a smaller type
        (``get_configs_from_heuristics`` and ``filterEngineConfigs`` in aten/src/ATen/native/cudnn/Conv_v8.cpp).
        With ``torch.backends.cudnn.benchmark`` it tries several, which this does not follow.

        Args:
            convolution: What is computed.

        Returns:
            Bytes that live while the convolution runs; 0 if cuDNN cannot be asked.
        """
        if self._library is None:
            return 0
        if convolution not in self._known:
            try:
                with _Backend(self._library) as backend:
                    self._known[convolution] = self._first_workspace(backend, convolution)
            except _Refused:
                self.unanswered += 1
                self._known[convolution] = 0
        return self._known[convolution]

    def _first_workspace(self, backend: _Backend, convolution: Convolution) -> int:
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
        for config in configs[:found]:
            if not _down_converts(backend, config):
                size = _int64s([0])
                backend.get(config, 303, _INT64, size)
                return int(size[0])
        raise _Refused("no engine")


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


def _down_converts(backend: _Backend, config: Any) -> bool:
    engine = backend.make(_ENGINE, final=False)
    backend.get(config, 300, _DESCRIPTOR, _descriptors(engine))
    notes = (ctypes.c_int * 32)()
    count = backend.get(engine, 1303, _NOTE, notes)
    return _NOTE_DOWN_CONVERTS in notes[:count]


def _version() -> int | None:
    try:
        version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError:  # Another cuDNN than the one torch was built with.
        return None
    return version


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """Return cuDNN as torch loads it, or ``None`` if it is missing or too old to take a description."""
    version = _version()
    if version is None or version < _FIRST_VERSION:
        return None
    try:
        return ctypes.CDLL("libcudnn.so.9")
    except OSError:
        return None
