from __future__ import annotations

import pytest
import torch

from lightning_memprec.memory.workspaces import (
    CudaWorkspaces,
    cublas_workspace_bytes,
    cuda_kernel_allocations,
)

aten = torch.ops.aten
FLOAT, HALF = torch.float32, torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


class TestCublas:
    @pytest.mark.parametrize(
        ("capability", "size_bytes"),
        [((7, 5), 8_519_680), ((8, 9), 8_519_680), ((9, 0), 32 * 2**20), ((10, 0), 8_519_680)],
    )
    def test_size_by_generation(self, capability, size_bytes):
        assert cublas_workspace_bytes(capability) == size_bytes

    @pytest.mark.parametrize(
        ("config", "size_bytes"),
        [(":0:0", 0), (":16:8", 16 * 8 * 1024), (":4096:2:16:8", 8_519_680), ("nonsense", 8_519_680)],
    )
    def test_environment_sets_the_size(self, monkeypatch, config, size_bytes):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
        assert cublas_workspace_bytes((8, 0)) == size_bytes

    def test_one_workspace_for_each_of_two_threads(self):
        workspaces = CudaWorkspaces((8, 0))
        calls = [(aten.add.Tensor, False), (aten.mm.default, False), (aten.addmm.default, False)]
        calls += [(aten.bmm.default, True), (aten.mm.default, True)]
        assert [workspaces.first_use(*call) for call in calls] == [0, 8_519_680, 0, 8_519_680, 0]


class TestKernels:
    def test_flash_attention_backward(self):
        # Rows are rounded to 128, head sizes to 32: 2 * 8 * 128 rows of 96 and one sum in float32.
        query = meta(2, 8, 100, 72, dtype=HALF)
        arguments = (query, query, query, query, query)
        backward = aten._scaled_dot_product_flash_attention_backward.default
        assert list(cuda_kernel_allocations(backward, arguments, {})) == [2 * 8 * 128 * (96 + 1) * 4]

    def test_flash_attention_backward_expands_shared_heads(self):
        query, key = meta(1, 8, 128, 64, dtype=HALF), meta(1, 2, 128, 64, dtype=HALF)
        backward = aten._scaled_dot_product_flash_attention_backward.default
        shared = sum(cuda_kernel_allocations(backward, (query, query, key, key), {}))
        own = sum(cuda_kernel_allocations(backward, (query, query, query, query), {}))
        assert shared - own == 2 * 8 * 128 * 64 * 2

    @pytest.mark.parametrize(("dtype", "accumulator"), [(FLOAT, 0), (HALF, 2 * 4 * 128 * 64 * 4)])
    def test_efficient_attention_backward(self, dtype, accumulator):
        query = meta(2, 4, 100, 64, dtype=dtype)
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        sizes = list(cuda_kernel_allocations(backward, (query, query, query, query), {}))
        assert sizes == [2 * 4 * 100 * 4 + accumulator]

    @pytest.mark.parametrize(
        ("count", "by_frequency", "size_bytes"),
        [(3072, False, 0), (3072, True, 3072 * (7 * 8 + 64 * 4)), (3073, False, 3073 * (6 * 8 + 64 * 4))],
    )
    def test_embedding_backward(self, count, by_frequency, size_bytes):
        arguments = (meta(count, 64, dtype=HALF), meta(count, dtype=torch.int64), 1000, -1, by_frequency)
        assert (
            sum(cuda_kernel_allocations(aten.embedding_dense_backward.default, arguments, {})) == size_bytes
        )

    def test_layer_norm_copies_what_is_not_dense(self):
        dense, turned = meta(8, 16, 32), meta(8, 32, 16).transpose(1, 2)
        layer_norm = aten.native_layer_norm.default
        assert sum(cuda_kernel_allocations(layer_norm, (dense, [32], None, None, 1e-5), {})) == 0
        assert (
            sum(cuda_kernel_allocations(layer_norm, (turned, [32], None, None, 1e-5), {})) == 8 * 16 * 32 * 4
        )

    def test_other_operators_allocate_nothing(self):
        assert list(cuda_kernel_allocations(aten.add.Tensor, (meta(4), meta(4)), {})) == []
