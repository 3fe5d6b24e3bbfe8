"""Primal-Attention: self-attention in the primal form of an asymmetric kernel SVD (arXiv 2305.19798).

Axes: B batch, L tokens, M chosen tokens, H heads, D width, P = D / H, R rank, N rows of data-dependent weights. An axis
of size 2 holds queries and keys, phi_q and phi_k, or e and r, so that both go through the same product.
"""

from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_dt.attention.feature_maps import CosineMap, ExponentialMap, FeatureMap
from primal_dt.attention.ksvd import ksvd_objective
from primal_dt.attention.layer import AttentionLayer, Positions, at_least_float32, select
from primal_dt.attention.padding import spread_rows

__all__ = ["FeatureMapName", "PrimalAttention"]

FeatureMapName = Literal["cosine", "exponential"]


class _Weights(NamedTuple):
    projections: Tensor
    """W_{e|X} and W_{r|X}: (2, H, P, R), or (2, B, H, P, R) if they depend on the data."""
    used: Tensor | None
    """(B, N) bool, which rows of the parameters are used; None if the weights do not depend on the data."""


class PrimalAttention(AttentionLayer):
    """``o_i = W_o [e(x_i); r(x_i)]``, ``e(x) = W_{e|X}' phi_q(x)``, ``r(x) = W_{r|X}' phi_k(x)``.

    e and r are the projection scores of the kernel SVD (KSVD) of ``K_ij = <f(X) phi_q(x_i), f(X) phi_k(x_j)>`` on its
    left and right singular vectors. There is no value projection and no L x L matrix: O(L P R) time and O(L P) memory.
    One linear map, shared by the heads, maps the pair ``[e; r]`` to width P. The heads are then joined and projected.

    ``J``, returned with ``with_objective=True``, is zero at every KSVD solution (Lemma 4.2). To train toward one, add
    ``eta * J.square().mean()`` to the loss. Lambda is learned through J alone. If J is not in the loss, call
    ``layer.lam.requires_grad_(False)`` so that DistributedDataParallel does not wait for its gradient.

    Tokens interact through data-dependent weights ``W_{e|X} = X'^T W_e``, where X' holds some rows of the sequence
    itself. They are the default, as in the paper's bidirectional experiments. With data-independent weights and the
    cosine map, an output depends on its own token alone. (In :class:`CausalPrimalAttention`, tokens interact through
    prefix means.)

    Choices that the paper leaves open, or where its published code differs from the paper:

    * Lambda is ``|lam|`` with slope one at zero: it is nonnegative, and its gradient vanishes nowhere.
      (The published code learns the square root of Lambda, which cannot leave zero.)
    * ``e_weight`` and ``r_weight`` start with orthonormal columns in each head (orthonormal rows, if there are fewer
      rows than columns), like singular vectors. (The published code applies ``orthogonal_`` to the 3-D tensor, which
      orthogonalizes the heads.)
    * Data-dependent weights use evenly spaced rows of the *valid* part of each sequence.

    Args:
        width: D, the width of the input and the output.
        num_heads: H; must divide the width.
        rank: R, the number of projection directions. The theory covers R <= min(L, P).
        feature_map: ``cosine``, or ``exponential`` (positive random features, symmetrically normalized).
        data_dependent: use ``f(X) = X'``, N rows of the head's slice of the input; otherwise ``f(X) = I``.
        rank_multi: with data-dependent weights, ``N = rank * rank_multi``. A sequence with n < N tokens uses the first
            n rows of the weights.
        max_rows: with data-dependent weights, an upper limit on N, such as the length of your longest sequence.
        dropout: dropout probability after the output projection.
        bias: whether the linear maps have biases.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("rank", "data_dependent", "num_rows")
    _causal: ClassVar[bool] = False

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        rank: int = 32,
        feature_map: FeatureMapName = "cosine",
        data_dependent: bool = True,
        rank_multi: int = 10,
        max_rows: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width=width, num_heads=num_heads, causal=self._causal, dropout=dropout, bias=bias)
        if rank < 1:
            raise ValueError(f"rank ({rank}) must be at least 1")
        if rank_multi < 1:
            raise ValueError(f"rank_multi ({rank_multi}) must be at least 1")
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows ({max_rows}) must be at least 1")
        self.rank = rank
        self.data_dependent = data_dependent
        self.feature_map = self._build_feature_map(feature_map)
        self.query_key = nn.Linear(width, 2 * width, bias=bias)  # W_q over W_k

        self.num_rows = self.head_width
        if data_dependent:
            self.num_rows = rank * rank_multi if max_rows is None else min(rank * rank_multi, max_rows)
        self.e_weight = nn.Parameter(torch.empty(num_heads, self.num_rows, rank))  # W_e
        self.r_weight = nn.Parameter(torch.empty(num_heads, self.num_rows, rank))  # W_r
        self.lam = nn.Parameter(torch.empty(num_heads, rank))  # Lambda = |lam|
        self.merge = nn.Linear(2 * rank, self.head_width, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if isinstance(self.feature_map, ExponentialMap):
            self.feature_map.reset_parameters()
        for head in (*self.e_weight.unbind(), *self.r_weight.unbind()):
            nn.init.orthogonal_(head)
        with torch.no_grad():
            # The square of U[0, 1), as the published code initializes Lambda.
            self.lam.uniform_().square_()

    @property
    def lambda_(self) -> Tensor:
        """(H, R), the diagonal of Lambda. At zero its gradient is one; that of ``torch.abs`` is zero."""
        return torch.where(self.lam < 0, -self.lam, self.lam)

    def _attend(
        self, x: Tensor, valid: Tensor | None, positions: Positions, with_objective: bool
    ) -> tuple[Tensor, Tensor | None]:
        context = self._context(x, valid)  # (B, L, D)
        weights = self._weights(x, valid)

        # J needs the scores of all tokens, and a normalized map needs the features of all tokens. Otherwise only the
        # chosen tokens are computed from here on.
        if with_objective:
            scores = self._scores(self._features(context, valid), weights)  # (2, H, B, L, R)
            objective = ksvd_objective(scores, self.lambda_, self._trace(weights.used), valid)
            if positions is not None:
                scores = scores[:, :, :, positions]  # (2, H, B, M, R)
        else:
            objective = None
            if self.feature_map.pointwise:
                phi = self._features(select(context, positions), None)  # (B, M, 2, H, P)
            else:
                phi = select(self._features(context, valid), positions)
            scores = self._scores(phi, weights)  # (2, H, B, M, R)
        return self._merge(scores), objective

    def kernel_matrix(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(B, H, L, L), ``K_ij = <f(X) phi_q(x_i), f(X) phi_k(x_j)>``, the matrix whose SVD the layer targets."""
        x = self._clear_padding(x, valid)
        phi = self._features(self._context(x, valid), valid)  # (B, L, 2, H, P)
        if self.data_dependent:
            rows, _ = self._rows(x, valid)  # (B, N, H, P)
            phi = torch.einsum("bnhp,blshp->blshn", rows, phi)
        phi_q, phi_k = phi.unbind(2)
        matrix = torch.einsum("blhp,bmhp->bhlm", phi_q, phi_k)
        if valid is None:
            return matrix
        return matrix.masked_fill(~(valid[:, None, :, None] & valid[:, None, None, :]), 0.0)

    def _build_feature_map(self, name: str) -> FeatureMap:
        if name == "cosine":
            return CosineMap()
        if name == "exponential":
            return ExponentialMap(head_width=self.head_width, causal=self.causal)
        raise ValueError(f"feature_map must be 'cosine' or 'exponential', not {name!r}")

    def _context(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """(B, L, D), the input of the query and key projections: here the tokens themselves."""
        return x

    def _queries_and_keys(self, context: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, 2, H, P)."""
        return self.query_key(context).unflatten(-1, (2, self.num_heads, self.head_width))

    def _features(self, context: Tensor, valid: Tensor | None) -> Tensor:
        """(B, L, D) -> phi_q, phi_k as (B, L, 2, H, P)."""
        return self.feature_map(self._queries_and_keys(context), valid)

    def _weights(self, x: Tensor, valid: Tensor | None) -> _Weights:
        parameters = torch.stack((self.e_weight, self.r_weight))  # (2, H, P, R) or (2, H, N, R)
        if not self.data_dependent:
            return _Weights(parameters, None)
        rows, used = self._rows(x, valid)  # (B, N, H, P), (B, N)
        n = rows.shape[1]  # a short batch uses the first rows of the parameters
        return _Weights(torch.einsum("bnhp,shnr->sbhpr", rows, parameters[:, :, :n].to(rows.dtype)), used)

    def _trace(self, used: Tensor | None) -> Tensor:
        """Tr(W_e' W_r), (H, B or 1), of the raw parameters: with W_{e|X} instead, Lemma 4.2 would not hold."""
        dtype = at_least_float32(self.e_weight.dtype)  # J is a small difference of large numbers
        by_row = (self.e_weight.to(dtype) * self.r_weight.to(dtype)).sum(-1)  # (H, P) or (H, N)
        if used is None:
            return by_row.sum(-1, keepdim=True)
        return (by_row[:, None, : used.shape[1]] * used).sum(-1)

    def _rows(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """X' (B, N, H, P), evenly spaced tokens of each sequence, zero in unused rows; and the used rows (B, N)."""
        index, used = spread_rows(x, valid, self.num_rows)  # (B, N), (B, N)
        rows = x.take_along_dim(index[..., None], 1).masked_fill(~used[..., None], 0.0)  # (B, N, D)
        return rows.unflatten(-1, (self.num_heads, self.head_width)), used

    def _scores(self, phi: Tensor, weights: _Weights) -> Tensor:
        """phi_q, phi_k (B, M, 2, H, P) -> e, r as (2, H, B, M, R), the axis order that the product produces."""
        equation = "bmshp,sbhpr->shbmr" if self.data_dependent else "bmshp,shpr->shbmr"
        return torch.einsum(equation, phi, weights.projections.to(phi.dtype))

    def _merge(self, scores: Tensor) -> Tensor:
        """e, r (2, H, B, M, R) -> ``[e; r]`` mapped to (B, M, H, P), without concatenating e and r.

        The linear map is applied in two halves, so hooks on ``merge`` do not fire.
        """
        _, H, B, M, _ = scores.shape
        e, r = scores.to(self.merge.weight.dtype).flatten(1, 3).unbind()  # (H B M, R) each
        e_map, r_map = self.merge.weight.split(self.rank, dim=1)  # (P, R) each
        merged = F.linear(e, e_map, self.merge.bias)  # (H B M, P)
        merged = merged.addmm_(r.to(merged.dtype), r_map.T.to(merged.dtype))  # in place: addmm would copy merged first
        return merged.unflatten(0, (H, B, M)).permute(1, 2, 0, 3)
