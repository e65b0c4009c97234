"""Which operators ``torch.autocast`` touches on each device, and how.

Sources: torch 2.14, ``ATen/autocast_mode.h`` (the ``AT_FORALL_*`` macros, used by AutocastCUDA) and
``ATen/autocast_mode.cpp``. An operator that another version of torch lacks, or does not cast, is left out
when the table is built, so the lists hold the union of the supported versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch._ops import OpOverload

__all__ = ["POLICIES", "Policy", "operators"]

Policy = Literal[
    "lower_precision", "float32", "float32_output", "float32_norm", "promote", "banned", "cudnn_rnn"
]

_CUDA: dict[Policy, str] = {
    # Floating inputs are cast to the autocast dtype.
    "lower_precision": """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
        conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum
        mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
        _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
        cudnn_convolution_transpose
    """,
    # Floating inputs are cast to float32.
    "float32": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
        frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
        cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
        huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
        logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
        upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
        _upsample_bicubic2d_aa linalg_matrix_sqrth
    """,
    # The output dtype becomes float32 unless the caller names one; inputs stay as they are. cross_entropy
    # names its input's dtype when it calls log_softmax, so log-probabilities stay in the autocast dtype.
    "float32_output": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
        linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
    """,
    # Redispatched to the overload that takes an output dtype.
    "float32_norm": "norm.Scalar norm.ScalarOpt_dim",
    # Floating inputs are cast to the widest dtype among them.
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "banned": "binary_cross_entropy",
    "cudnn_rnn": "_cudnn_rnn",
}

_CPU: dict[Policy, str] = {
    "lower_precision": """
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm
        addmm _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu
        scaled_dot_product_attention _native_multi_head_attention
    """,
    "float32": """
        avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile quantile.scalar
        nanquantile nanquantile.scalar stft stft.center cdist grid_sampler_2d
        _grid_sampler_2d_cpu_fallback grid_sampler_3d trace view_as_complex cholesky_inverse
        cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d
        adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
        poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss
        soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div
        multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2
        fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft
        fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float linalg_solve
        linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv
        linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine
        geqrf _lu_with_info svd triangular_solve fractional_max_pool2d fractional_max_pool3d
        adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd
        linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex linalg_matrix_sqrth cholesky qr
    """,
    "promote": "stack cat index_copy",
}

POLICIES: dict[Literal["cuda", "cpu"], dict[Policy, str]] = {"cuda": _CUDA, "cpu": _CPU}


def operators(device_type: Literal["cuda", "cpu"]) -> Iterator[tuple[OpOverload, Policy]]:
    """Yield each operator that autocast handles in the installed torch, with its policy.

    Args:
        device_type: Device whose autocast is meant.

    Yields:
        Operator overload and name of its policy.

    Example:
        >>> dict(operators("cuda"))[torch.ops.aten.linear.default]
        'lower_precision'
    """
    key = f"Autocast{device_type.upper()}"
    for policy, names in POLICIES[device_type].items():
        for name in names.split():
            # `_cudnn_rnn` is registered by the CUDA library, which a CPU build lacks.
            if policy == "cudnn_rnn" or _casts(f"aten::{name}", key):
                packet, _, overload = name.partition(".")
                yield getattr(getattr(torch.ops.aten, packet), overload or "default"), policy


def _casts(qualified_name: str, key: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, key)
    except RuntimeError:  # This version of torch has no such operator.
        return False
