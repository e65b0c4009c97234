from __future__ import annotations

import pytest
import torch

from lightning_memprec.memory import cudnn
from lightning_memprec.memory.convolution import convolution_workspaces
from lightning_memprec.memory.cudnn import Convolution, CudnnFlags, CudnnHeuristics

aten = torch.ops.aten
FLOAT, HALF = torch.float32, torch.bfloat16
needs_cudnn = pytest.mark.skipif(
    CudnnHeuristics((8, 0)).version is None, reason="no cuDNN 9.8 or newer to ask"
)


def meta(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def convolve(x, w, *, stride=1, padding=1, transposed=False, groups=1, heuristics):
    n = x.dim() - 2
    arguments = (x, w, None, [stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups)
    return list(convolution_workspaces(aten.convolution.default, arguments, {}, heuristics))


def convolve_backward(x, w, y, *, transposed=False, mask=(True, True, False), heuristics):
    n = x.dim() - 2
    arguments = (y, x, w, None, [1] * n, [1] * n, [1] * n, transposed, [0] * n, 1, list(mask))
    return list(convolution_workspaces(aten.convolution_backward.default, arguments, {}, heuristics))


class TestConvolution:
    def test_without_cudnn_nothing_is_said(self, monkeypatch):
        monkeypatch.setattr(cudnn, "_library", lambda: None)
        heuristics = CudnnHeuristics((8, 0))
        assert convolve(meta(2, 8, 16, 16), meta(8, 8, 3, 3), heuristics=heuristics) == [(0, 0)]

    def test_other_operators_have_none(self):
        arguments = (meta(4), meta(4))
        assert list(convolution_workspaces(aten.add.Tensor, arguments, {}, CudnnHeuristics((8, 0)))) == []

    @needs_cudnn
    def test_tensor_cores_want_copies_in_their_layout(self):
        """They read channels-last data: what lies otherwise is copied in the workspace."""
        heuristics = CudnnHeuristics((8, 0))
        x, w = meta(64, 64, 56, 56, dtype=HALF), meta(64, 64, 3, 3, dtype=HALF)
        x_bytes = x.numel() * 2
        ((copied, _),) = convolve(x, w, heuristics=heuristics)
        ((as_is, _),) = convolve(x.to(memory_format=torch.channels_last), w, heuristics=heuristics)
        assert as_is < x_bytes <= copied
        assert heuristics.unanswered == 0

    @needs_cudnn
    def test_workspace_grows_with_the_batch(self):
        heuristics = CudnnHeuristics((8, 6))
        x, w = (lambda n: meta(n, 64, 86, 86)), meta(64, 64, 3, 3)
        sizes = [
            sum(size for size, _ in convolve_backward(x(n), w, x(n), heuristics=heuristics)) for n in (32, 64)
        ]
        assert sizes[0] > 0
        assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.05)

    @needs_cudnn
    def test_backward_asks_for_what_is_wanted(self):
        heuristics = CudnnHeuristics((8, 0))
        x, w = meta(8, 64, 28, 28), meta(64, 64, 3, 3)
        both = convolve_backward(x, w, x, heuristics=heuristics)
        only_weight = convolve_backward(x, w, x, mask=(False, True, False), heuristics=heuristics)
        assert both[1:] == only_weight

    @needs_cudnn
    def test_transposed_forward_is_a_data_gradient(self):
        heuristics = CudnnHeuristics((8, 0))
        x, w = meta(16, 64, 28, 28), meta(64, 64, 3, 3)
        forward = convolve(x, w, transposed=True, heuristics=heuristics)
        gradient = Convolution.of("data gradient", x, w, x, [1, 1], [1, 1], [1, 1])
        assert forward == [heuristics.workspace(gradient)]

    @needs_cudnn
    @pytest.mark.parametrize("spatial", [(4096,), (8, 24, 24)])
    def test_signals_and_volumes_are_answered(self, spatial):
        heuristics = CudnnHeuristics((8, 0))
        kernel = [3] * len(spatial)
        convolve(meta(4, 32, *spatial), meta(32, 32, *kernel), heuristics=heuristics)
        assert heuristics.unanswered == 0

    @needs_cudnn
    def test_depthwise_runs_in_torch_unless_channels_last(self):
        heuristics = CudnnHeuristics((8, 6))
        x, w = meta(8, 32, 28, 28), meta(32, 1, 3, 3)
        assert convolve(x, w, groups=32, heuristics=heuristics) == []
        assert (
            len(convolve(x.to(memory_format=torch.channels_last), w, groups=32, heuristics=heuristics)) == 1
        )

    @needs_cudnn
    def test_what_cudnn_refuses_counts_as_nothing_and_is_counted(self):
        heuristics = CudnnHeuristics((8, 0))
        x, w = meta(2, 8, 4, 4), meta(8, 8, 3, 3)
        impossible = Convolution.of("forward", x, w, meta(2, 8, 99, 99), [1, 1], [1, 1], [1, 1])
        assert heuristics.workspace(impossible) == (0, 0)
        assert heuristics.workspace(impossible) == (0, 0)
        assert heuristics.unanswered == 1

    @needs_cudnn
    def test_some_engine_runs_in_little_memory(self):
        """Torch tries engine after engine until one finds memory."""
        heuristics = CudnnHeuristics((8, 6))
        x, w = meta(480, 64, 86, 86), meta(64, 64, 3, 3)
        for size_bytes, smallest_bytes in convolve_backward(x, w, x, heuristics=heuristics):
            assert smallest_bytes < 0.1 * size_bytes

    @needs_cudnn
    def test_benchmark_mode_tries_the_largest_once(self):
        x, w = meta(16, 64, 28, 28), meta(64, 64, 3, 3)
        (usual,) = convolve(x, w, heuristics=CudnnHeuristics((8, 0)))
        tried = CudnnHeuristics((8, 0), CudnnFlags(benchmark=True))
        (first,), (second,) = (convolve(x, w, heuristics=tried) for _ in range(2))
        assert first.size_bytes >= usual.size_bytes
        assert second == usual

    @needs_cudnn
    def test_without_tf32_float32_is_not_copied_for_tensor_cores(self):
        x, w = meta(64, 64, 56, 56), meta(64, 64, 3, 3)
        (allowed,) = convolve(x, w, heuristics=CudnnHeuristics((8, 0)))
        (forbidden,) = convolve(x, w, heuristics=CudnnHeuristics((8, 0), CudnnFlags(allow_tf32=False)))
        assert forbidden.size_bytes < x.numel() * 4 <= allowed.size_bytes

    def test_flags_are_those_of_the_process(self):
        assert CudnnFlags.current() == CudnnFlags()
        with torch.backends.cudnn.flags(benchmark=True, deterministic=True, allow_tf32=False):
            assert CudnnFlags.current() == (True, True, False)
