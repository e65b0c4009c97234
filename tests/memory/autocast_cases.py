"""One call of every operator that autocast handles on some device: `CASES[name](op, Inputs(...))`."""

from itertools import cycle

import torch


class Inputs:
    """`t(2, 3)` is a floating tensor whose dtype is the next of a cycle."""

    def __init__(self, device, dtypes):
        self.device = device
        self._dtypes = cycle(dtypes)

    def __call__(self, *shape):
        return torch.full(shape, 0.5, dtype=next(self._dtypes), device=self.device)

    def long(self, *shape):
        return torch.zeros(shape, dtype=torch.long, device=self.device)

    def eye(self, size):
        """Return a matrix that every factorisation accepts."""
        return self(size, size).tril().add(torch.eye(size, device=self.device, dtype=torch.float16))

    def lengths(self, *values):
        return torch.tensor(values, device=self.device)


_UNARY = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus prod sum
    norm.Scalar nuclear_norm linalg_vector_norm trace pdist
"""
_PAIR = """
    matmul linalg_vecdot atan2 dist cdist cosine_similarity l1_loss smooth_l1_loss huber_loss mse_loss
    kl_div soft_margin_loss hinge_embedding_loss binary_cross_entropy_with_logits pow.Tensor_Tensor
    polar linear mm
"""
_SQUARE = """
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_inv linalg_inv_ex linalg_matrix_sqrth linalg_qr linalg_svd linalg_svdvals geqrf inverse
    pinverse svd cholesky_inverse _lu_with_info
"""
_FFT = (
    "fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_rfft fft_rfft2 fft_rfftn"
)
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _cell(gates, *, tuple_state):
    def call(op, t):
        state = t(2, 4)
        return op(
            t(2, 3),
            [state, t(2, 4)] if tuple_state else state,
            t(4 * gates, 3), t(4 * gates, 4), t(4 * gates), t(4 * gates),
        )  # fmt: skip

    return call


# One call of every operator that autocast handles: `CASES[name](op, t)`.
CASES = {
    **{name: lambda op, t: op(t(3, 4)) for name in _UNARY.split()},
    **{name: lambda op, t: op(t(3, 3), t(3, 3)) for name in _PAIR.split()},
    **{name: lambda op, t: op(t.eye(3)) for name in _SQUARE.split()},
    **{name: lambda op, t: op(t(4, 4)) for name in _FFT.split()},
    # C2R transforms take complex input, which autocast leaves alone.
    **{name: lambda op, t: op(t(4, 4).float() + 0j) for name in ("fft_irfft", "fft_irfft2", "fft_irfftn")},
    **{f"{name}_cell": _cell(gates, tuple_state=name == "lstm") for name, gates in _GATES.items()},
    # -- convolutions, products
    "_convolution.deprecated": lambda op, t: op(
        t(1, 2, 4, 4), t(3, 2, 1, 1), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False
    ),
    "_convolution": lambda op, t: op(
        t(1, 2, 4, 4),
        t(3, 2, 1, 1),
        t(3),
        [1, 1],
        [0, 0],
        [1, 1],
        False,
        [0, 0],
        1,
        False,
        False,
        False,
        False,
    ),
    "convolution": lambda op, t: op(
        t(1, 2, 4, 4), t(3, 2, 1, 1), t(3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "conv1d": lambda op, t: op(t(1, 2, 4), t(3, 2, 1), t(3)),
    "conv2d": lambda op, t: op(t(1, 2, 4, 4), t(3, 2, 1, 1), t(3)),
    "conv3d": lambda op, t: op(t(1, 2, 4, 4, 4), t(3, 2, 1, 1, 1), t(3)),
    "conv1d.padding": lambda op, t: op(t(1, 2, 4), t(3, 2, 3), t(3), padding="same"),
    "conv2d.padding": lambda op, t: op(t(1, 2, 4, 4), t(3, 2, 3, 3), t(3), padding="same"),
    "conv3d.padding": lambda op, t: op(t(1, 2, 4, 4, 4), t(3, 2, 3, 3, 3), t(3), padding="same"),
    "conv_tbc": lambda op, t: op(t(4, 1, 2), t(1, 2, 3), t(3)),
    "conv_transpose1d": lambda op, t: op(t(1, 2, 4), t(2, 3, 1), t(3)),
    "conv_transpose2d.input": lambda op, t: op(t(1, 2, 4, 4), t(2, 3, 1, 1), t(3)),
    "conv_transpose3d.input": lambda op, t: op(t(1, 2, 4, 4, 4), t(2, 3, 1, 1, 1), t(3)),
    "prelu": lambda op, t: op(t(2, 3), t(3)),
    "addmm": lambda op, t: op(t(3), t(2, 4), t(4, 3)),
    "_addmm_activation": lambda op, t: op(t(3), t(2, 4), t(4, 3)),
    "addmv": lambda op, t: op(t(2), t(2, 4), t(4)),
    "addr": lambda op, t: op(t(2, 3), t(2), t(3)),
    "mv": lambda op, t: op(t(2, 4), t(4)),
    "bmm": lambda op, t: op(t(2, 3, 4), t(2, 4, 3)),
    "addbmm": lambda op, t: op(t(3, 3), t(2, 3, 4), t(2, 4, 3)),
    "baddbmm": lambda op, t: op(t(2, 3, 3), t(2, 3, 4), t(2, 4, 3)),
    "einsum": lambda op, t: op("ij,jk", [t(2, 3), t(3, 4)]),
    "chain_matmul": lambda op, t: op([t(2, 3), t(3, 4), t(4, 2)]),
    "linalg_multi_dot": lambda op, t: op([t(2, 3), t(3, 4), t(4, 2)]),
    "_thnn_fused_lstm_cell": lambda op, t: op(t(2, 16), t(2, 16), t(2, 4), t(16), t(16)),
    "_scaled_dot_product_flash_attention": lambda op, t: op(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "scaled_dot_product_attention": lambda op, t: op(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)),
    "_native_multi_head_attention": lambda op, t: op(
        t(1, 4, 8), t(1, 4, 8), t(1, 4, 8), 8, 2, t(24, 8), t(24), t(8, 8), t(8), need_weights=False
    ),
    "mkldnn_rnn_layer": lambda op, t: op(
        t(5, 2, 3),
        t(16, 3),
        t(16, 4),
        t(16),
        t(16),
        t(2, 4),
        t(2, 4),
        False,
        [],
        2,
        4,
        1,
        True,
        False,
        False,
        False,
    ),
    # -- float32
    "pow.Tensor_Scalar": lambda op, t: op(t(3), 2),
    "pow.Scalar": lambda op, t: op(2.0, t(3)),
    "layer_norm": lambda op, t: op(t(3, 4), [4], t(4), t(4)),
    "native_layer_norm": lambda op, t: op(t(3, 4), [4], t(4), t(4), 1e-5),
    "rms_norm": lambda op, t: op(t(3, 4), [4], t(4)),
    "group_norm": lambda op, t: op(t(3, 4), 2, t(4), t(4)),
    "frobenius_norm.dim": lambda op, t: op(t(3, 4), [1]),
    "nuclear_norm.dim": lambda op, t: op(t(3, 4), [0, 1]),
    "poisson_nll_loss": lambda op, t: op(t(3), t(3), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda op, t: op(t(3, 4), t(3, 4), t(3)),
    "nll_loss": lambda op, t: op(t(3, 4), t.long(3), t(4)),
    "nll_loss2d": lambda op, t: op(t(3, 4, 2, 2), t.long(3, 2, 2), t(4)),
    "cross_entropy_loss": lambda op, t: op(t(3, 4), t.long(3), t(4)),
    "margin_ranking_loss": lambda op, t: op(t(3), t(3), t(3)),
    "multilabel_margin_loss": lambda op, t: op(t(3, 4), t.long(3, 4)),
    "multilabel_margin_loss_forward": lambda op, t: op(t(3, 4), t.long(3, 4), 1),
    "multi_margin_loss": lambda op, t: op(t(3, 4), t.long(3)),
    "triplet_margin_loss": lambda op, t: op(t(3, 4), t(3, 4), t(3, 4)),
    "renorm": lambda op, t: op(t(3, 4), 2, 0, 1),
    "logsumexp": lambda op, t: op(t(3, 4), [1]),
    "upsample_nearest1d": lambda op, t: op(t(1, 2, 4), [8]),
    "_upsample_nearest_exact1d": lambda op, t: op(t(1, 2, 4), [8]),
    "upsample_linear1d": lambda op, t: op(t(1, 2, 4), [8], False),
    "upsample_nearest2d": lambda op, t: op(t(1, 2, 4, 4), [8, 8]),
    "_upsample_nearest_exact2d": lambda op, t: op(t(1, 2, 4, 4), [8, 8]),
    "upsample_bilinear2d": lambda op, t: op(t(1, 2, 4, 4), [8, 8], False),
    "_upsample_bilinear2d_aa": lambda op, t: op(t(1, 2, 4, 4), [8, 8], False),
    "upsample_bicubic2d": lambda op, t: op(t(1, 2, 4, 4), [8, 8], False),
    "_upsample_bicubic2d_aa": lambda op, t: op(t(1, 2, 4, 4), [8, 8], False),
    "upsample_nearest3d": lambda op, t: op(t(1, 2, 4, 4, 4), [8, 8, 8]),
    "_upsample_nearest_exact3d": lambda op, t: op(t(1, 2, 4, 4, 4), [8, 8, 8]),
    "upsample_trilinear3d": lambda op, t: op(t(1, 2, 4, 4, 4), [8, 8, 8], False),
    "avg_pool3d": lambda op, t: op(t(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_pool3d": lambda op, t: op(t(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_avg_pool3d": lambda op, t: op(t(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool3d": lambda op, t: op(t(1, 2, 4, 4, 4), [2, 2, 2]),
    "fractional_max_pool2d": lambda op, t: op(t(1, 2, 4, 4), [2, 2], [2, 2], t(1, 2, 2)),
    "fractional_max_pool3d": lambda op, t: op(t(1, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2], t(1, 2, 3)),
    "max_unpool2d": lambda op, t: op(t(1, 2, 2, 2), t.long(1, 2, 2, 2), [4, 4]),
    "max_unpool3d": lambda op, t: op(
        t(1, 2, 2, 2, 2), t.long(1, 2, 2, 2, 2), [4, 4, 4], [2, 2, 2], [0, 0, 0]
    ),
    "reflection_pad1d": lambda op, t: op(t(1, 2, 4), [1, 1]),
    "reflection_pad2d": lambda op, t: op(t(1, 2, 4, 4), [1, 1, 1, 1]),
    "replication_pad1d": lambda op, t: op(t(1, 2, 4), [1, 1]),
    "replication_pad2d": lambda op, t: op(t(1, 2, 4, 4), [1, 1, 1, 1]),
    "replication_pad3d": lambda op, t: op(t(1, 2, 4, 4, 4), [1] * 6),
    "quantile": lambda op, t: op(t(3, 4), t(2)),
    "nanquantile": lambda op, t: op(t(3, 4), t(2)),
    "quantile.scalar": lambda op, t: op(t(3, 4), 0.5),
    "nanquantile.scalar": lambda op, t: op(t(3, 4), 0.5),
    "stft": lambda op, t: op(t(32), 8, window=t(8), onesided=True, return_complex=True),
    "stft.center": lambda op, t: op(t(32), 8, window=t(8), center=False, onesided=True, return_complex=True),
    "view_as_complex": lambda op, t: op(t(3, 2)),
    "cholesky_solve": lambda op, t: op(t(3, 1), t.eye(3)),
    "lu_solve": lambda op, t: op(t(3, 1), t.eye(3), torch.ones(3, dtype=torch.int32, device=t.device)),
    "orgqr": lambda op, t: op(t.eye(3), t(3)),
    "ormqr": lambda op, t: op(t.eye(3), t(3), t(3, 3)),
    "triangular_solve": lambda op, t: op(t(3, 1), t.eye(3)),
    "linalg_matrix_rank": lambda op, t: op(t.eye(3), 0.1),
    "linalg_cond.p_str": lambda op, t: op(t.eye(3), "fro"),
    "linalg_householder_product": lambda op, t: op(t.eye(3), t(3)),
    "linalg_lstsq": lambda op, t: op(t.eye(3), t(3, 1)),
    "linalg_matrix_rank.tol_tensor": lambda op, t: op(t.eye(3), t()),
    "linalg_matrix_rank.atol_rtol_float": lambda op, t: op(t.eye(3), atol=0.1),
    "linalg_matrix_rank.atol_rtol_tensor": lambda op, t: op(t.eye(3), atol=t()),
    "linalg_solve": lambda op, t: op(t.eye(3), t(3, 1)),
    "linalg_tensorinv": lambda op, t: op(t.eye(4).view(2, 2, 2, 2)),
    "linalg_tensorsolve": lambda op, t: op(t.eye(4).view(2, 2, 2, 2), t(2, 2)),
    "fake_quantize_per_tensor_affine": lambda op, t: op(t(3), 0.1, 0, 0, 255),
    "ctc_loss.IntList": lambda op, t: op(t(5, 2, 4), t.lengths(1, 2, 1, 2).view(2, 2), [5, 5], [2, 2]),
    "ctc_loss.Tensor": lambda op, t: op(
        t(5, 2, 4), t.lengths(1, 2, 1, 2).view(2, 2), t.lengths(5, 5), t.lengths(2, 2)
    ),
    # -- float32 output
    "prod.dim_int": lambda op, t: op(t(3, 4), 1),
    "softmax.int": lambda op, t: op(t(3, 4), 1),
    "log_softmax.int": lambda op, t: op(t(3, 4), 1),
    "cumprod": lambda op, t: op(t(3, 4), 1),
    "cumsum": lambda op, t: op(t(3, 4), 1),
    "linalg_matrix_norm.str_ord": lambda op, t: op(t(3, 4), "fro"),
    "sum.dim_IntList": lambda op, t: op(t(3, 4), [1]),
    "norm.ScalarOpt_dim": lambda op, t: op(t(3, 4), 2, [1]),
    "linalg_matrix_norm": lambda op, t: op(t(3, 4), 2),
    # -- promote
    "addcdiv": lambda op, t: op(t(3), t(3), t(3)),
    "addcmul": lambda op, t: op(t(3), t(3), t(3)),
    "bilinear": lambda op, t: op(t(2, 3), t(2, 4), t(5, 3, 4), t(5)),
    "cross": lambda op, t: op(t(2, 3), t(2, 3)),
    "dot": lambda op, t: op(t(3), t(3)),
    "vdot": lambda op, t: op(t(3), t(3)),
    "grid_sampler": lambda op, t: op(t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_2d": lambda op, t: op(t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, False),
    "_grid_sampler_2d_cpu_fallback": lambda op, t: op(t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_3d": lambda op, t: op(t(1, 2, 4, 4, 4), t(1, 3, 3, 3, 3), 0, 0, False),
    "index_put": lambda op, t: op(t(3), [t.long(1)], t(1)),
    "index_copy": lambda op, t: op(t(3, 4), 0, t.long(1), t(1, 4)),
    "tensordot": lambda op, t: op(t(2, 3), t(3, 4), [1], [0]),
    "scatter_add": lambda op, t: op(t(3), 0, t.long(3), t(3)),
    "stack": lambda op, t: op([t(3), t(3)]),
    "cat": lambda op, t: op([t(3), t(3)]),
    "binary_cross_entropy": lambda op, t: op(t(3), t(3)),
}
