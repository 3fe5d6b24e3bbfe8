"""Primal-Attention: self-attention in the primal form of an asymmetric kernel SVD (arXiv 2305.19798).

Axes: B batch, L tokens, M chosen tokens, H heads, D width, P = D / H, R rank, N rows of data-dependent
weights; and an axis of 2: queries and keys, phi_q and phi_k, e and r go side by side through the same products.
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
    """(B, N), which rows of the parameters took part; None if they do not depend on the data."""


class PrimalAttention(AttentionLayer):
    """``o_i = W_o [e(x_i); r(x_i)]``, ``e(x) = W_{e|X}' phi_q(x)``, ``r(x) = W_{r|X}' phi_k(x)``.

    e and r are the projection scores of the kernel SVD of ``K_ij = <f(X) phi_q(x_i), f(X) phi_k(x_j)>``,
    on its left and right singular vectors. There is no value projection and no L x L matrix: O(L P R)
    time and O(L P) memory. The pair is mapped to P by one linear map that the heads share, the heads
    are joined, then projected.

    ``J``, asked for with ``with_objective=True``, is zero at every KSVD solution (Lemma 4.2): add
    ``eta * J.square().mean()`` to a loss to pursue one. (Lambda is learned through J alone. If J stays out of
    the loss, ``layer.lam.requires_grad_(False)`` says so to DistributedDataParallel.)

    Tokens learn of each other through ``W_{e|X} = X'^T W_e`` with X' some rows of the sequence itself: data-dependent
    weights, the default, as in the paper's bidirectional experiments. With data-independent weights and the cosine
    map an output depends on its own token alone. (In :class:`CausalPrimalAttention` prefix means bring the past in.)

    Choices where the paper leaves one, or where its published code differs from it:

    * Lambda is ``|lam|`` with slope one at zero: not negative, and no point where its gradient vanishes.
      (The published code learns the root of Lambda, which cannot leave zero.)
    * ``e_weight`` and ``r_weight`` start with orthonormal columns in each head (rows, if there are fewer), as
      singular vectors have. (``orthogonal_`` on the 3-D tensor, as published, orthogonalizes the heads.)
    * Data-dependent weights take evenly spaced rows of the *valid* part of each sequence.

    Args:
        width: D, of the input and the output.
        num_heads: H; divides the width.
        rank: R, the number of projection directions. The theory covers R <= min(L, P).
        feature_map: ``cosine``, or ``exponential`` (positive random features, symmetrically normalized).
        data_dependent: ``f(X) = X'``, N rows of the head's slice of the input; else ``f(X) = I``.
        rank_multi: with data-dependent weights, ``N = rank * rank_multi``. A sequence with fewer tokens uses the first
            rows of the weights, as many as it has.
        max_rows: with data-dependent weights, an upper limit on N, such as the length of your longest sequence.
        dropout: after the output projection.
        bias: in all linear maps.
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
            # The square of U[0, 1), where the published code starts.
            self.lam.uniform_().square_()

    @property
    def lambda_(self) -> Tensor:
        """(H, R), the diagonal of Lambda. ``torch.abs`` would have no slope at zero; this has one."""
        return torch.where(self.lam < 0, -self.lam, self.lam)

    def _attend(
        self, x: Tensor, valid: Tensor | None, positions: Positions, with_objective: bool
    ) -> tuple[Tensor, Tensor | None]:
        context = self._context(x, valid)  # (B, L, D)
        weights = self._weights(x, valid)

        # J needs the scores of all tokens, a normalized map the features of all; otherwise only chosen
        # tokens are computed from here on.
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
        """(B, H, L, L), ``K_ij = <f(X) phi_q(x_i), f(X) phi_k(x_j)>``, the matrix whose SVD the layer pursues."""
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
        """(B, L, D), what queries and keys are projected from: here the tokens themselves."""
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
        """Tr(W_e' W_r), (H, B or 1), of the raw parameters: with W_{e|X} in it Lemma 4.2 would not hold."""
        dtype = at_least_float32(self.e_weight.dtype)  # J is a small difference of large numbers
        by_row = (self.e_weight.to(dtype) * self.r_weight.to(dtype)).sum(-1)  # (H, P) or (H, N)
        if used is None:
            return by_row.sum(-1, keepdim=True)
        return (by_row[:, None, : used.shape[1]] * used).sum(-1)

    def _rows(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """X' (B, N, H, P), evenly spaced tokens of each sequence, zero past its last; and which are used (B, N)."""
        index, used = spread_rows(x, valid, self.num_rows)  # (B, N), (B, N)
        rows = x.take_along_dim(index[..., None], 1).masked_fill(~used[..., None], 0.0)  # (B, N, D)
        return rows.unflatten(-1, (self.num_heads, self.head_width)), used

    def _scores(self, phi: Tensor, weights: _Weights) -> Tensor:
        """phi_q, phi_k (B, M, 2, H, P) -> e, r as (2, H, B, M, R), the order in which the product leaves them."""
        equation = "bmshp,sbhpr->shbmr" if self.data_dependent else "bmshp,shpr->shbmr"
        return torch.einsum(equation, phi, weights.projections.to(phi.dtype))

    def _merge(self, scores: Tensor) -> Tensor:
        """e, r (2, H, B, M, R) -> ``[e; r]`` mapped to (B, M, H, P), without joining the two first.

        The linear map is applied in two halves, so a hook on ``merge`` does not fire.
        """
        _, H, B, M, _ = scores.shape
        e, r = scores.to(self.merge.weight.dtype).flatten(1, 3).unbind()  # (H B M, R) each
        e_map, r_map = self.merge.weight.split(self.rank, dim=1)  # (P, R) each
        merged = F.linear(e, e_map, self.merge.bias)  # (H B M, P)
        merged = merged.addmm_(r.to(merged.dtype), r_map.T.to(merged.dtype))  # in place, or addmm copies it first
        return merged.unflatten(0, (H, B, M)).permute(1, 2, 0, 3)
