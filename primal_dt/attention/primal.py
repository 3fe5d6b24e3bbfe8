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
from primal_dt.attention.layer import AttentionLayer, AttentionOutput, Positions, at_least_float32, select
from primal_dt.attention.padding import spread_rows

__all__ = ["FeatureMapName", "PrimalAttention", "PrimalInit", "ScoreNames"]

FeatureMapName = Literal["cosine", "exponential"]
PrimalInit = Literal["unit", "orthonormal"]
ScoreNames = Literal["both", "e", "r"]
SCORES: dict[ScoreNames, slice] = {"both": slice(0, 2), "e": slice(0, 1), "r": slice(1, 2)}
"""Name -> which entries of an axis (e, r) the output is made of."""


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
    * ``e_weight`` and ``r_weight`` start with orthogonal columns in each head (orthogonal rows, if there are fewer rows
      than columns), like singular vectors, and with the published Frobenius norm of 1 per head. (The published code
      applies ``orthogonal_`` to the 3-D tensor. That gives each head norm 1, and makes the heads orthogonal to each
      other instead of the columns.)
    * Data-dependent weights use evenly spaced rows of the *valid* part of each sequence.

    **Cross-attention.** ``keys`` is a second sequence (z_j) of M tokens. The kernel is then the L x M matrix
    ``K_ij = <f(Z) phi_q(x_i), f(Z) phi_k(z_j)>``, where f takes rows of Z. Its KSVD has left scores e(x_i) at the
    queries and right scores r(z_j) at the keys: a query has no right score. So the output is made of e alone, as in
    the dual form of canonical attention (``e(x) = sum_j h_j K(x, z_j)``), and the layer must have ``scores="e"``. r
    enters J, whose two means run over the queries and over the keys. J is zero and stationary at a KSVD
    ``K = U S V'`` with ``Lambda = sqrt(L M) S^-1``, ``W_e = sum_j f(Z) phi_k(z_j) v_j'`` and
    ``W_r = sqrt(M / L) sum_i f(Z) phi_q(x_i) u_i'``; for L = M these are the conditions of self-attention.

    Args:
        width: D, the width of the input and the output.
        num_heads: H; must divide the width.
        rank: R, the number of projection directions. The theory covers R <= min(L, P).
        feature_map: ``cosine``, or ``exponential`` (positive random features, symmetrically normalized).
        data_dependent: use ``f(X) = X'``, N rows of the head's slice of the input; otherwise ``f(X) = I``.
        rank_multi: with data-dependent weights, ``N = rank * rank_multi``. A sequence with n < N tokens uses the first
            n rows of the weights.
        max_rows: with data-dependent weights, an upper limit on N, such as the length of your longest sequence.
        scores: the scores that the output is made of: ``both``, or only ``e`` (left) or ``r`` (right). J has both.
        init: ``unit``: e_weight and r_weight start with Frobenius norm 1 in each head, as published.
            ``orthonormal``: with orthonormal columns, norm ``sqrt(min(rows, R))``, so that J starts much larger.
        dropout: dropout probability after the output projection.
        bias: whether the linear maps have biases.
    """

    shown_options: ClassVar[tuple[str, ...]] = ("rank", "data_dependent", "num_rows", "scores")
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
        scores: ScoreNames = "both",
        init: PrimalInit = "unit",
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
        if scores not in SCORES:
            raise ValueError(f"scores must be one of {', '.join(SCORES)}, not {scores!r}")
        if init not in ("unit", "orthonormal"):
            raise ValueError(f"init must be 'unit' or 'orthonormal', not {init!r}")
        self.rank = rank
        self.scores = scores
        self.init = init
        self.data_dependent = data_dependent
        self.feature_map = self._build_feature_map(feature_map)
        self.query_key = nn.Linear(width, 2 * width, bias=bias)  # W_q over W_k

        self.num_rows = self.head_width
        if data_dependent:
            self.num_rows = rank * rank_multi if max_rows is None else min(rank * rank_multi, max_rows)
        self.e_weight = nn.Parameter(torch.empty(num_heads, self.num_rows, rank))  # W_e
        self.r_weight = nn.Parameter(torch.empty(num_heads, self.num_rows, rank))  # W_r
        self.lam = nn.Parameter(torch.empty(num_heads, rank))  # Lambda = |lam|
        self.merge = nn.Linear(2 * rank if scores == "both" else rank, self.head_width, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if isinstance(self.feature_map, ExponentialMap):
            self.feature_map.reset_parameters()
        gain = min(self.num_rows, self.rank) ** -0.5 if self.init == "unit" else 1.0
        for head in (*self.e_weight.unbind(), *self.r_weight.unbind()):
            nn.init.orthogonal_(head, gain)
        with torch.no_grad():
            # The square of U[0, 1), as the published code initializes Lambda.
            self.lam.uniform_().square_()

    @property
    def lambda_(self) -> Tensor:
        """(H, R), the diagonal of Lambda. At zero its gradient is one; that of ``torch.abs`` is zero."""
        return torch.where(self.lam < 0, -self.lam, self.lam)

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        *,
        positions: Positions = None,
        with_objective: bool = False,
        keys: Tensor | None = None,
        keys_valid: Tensor | None = None,
    ) -> AttentionOutput:
        """Compute self-attention, as in the base class, or cross-attention.

        Args:
            x: (B, L, D), the input tokens; with ``keys``, the queries.
            valid: (B, L) bool, True for real tokens; None if all tokens are real.
            positions: the M tokens to compute outputs for.
            with_objective: also return J.
            keys: (B, M, D), the tokens to attend to, for cross-attention. The layer must have ``scores="e"``, the
                cosine map and data-dependent weights, and must not be causal.
            keys_valid: (B, M) bool, True for real keys; None if all keys are real.

        Returns:
            The output (B, L, D) at the chosen positions, and J (B,) or None.
        """
        if keys is None:
            if keys_valid is not None:
                raise ValueError("keys_valid is given without keys")
            return super().forward(x, valid, positions=positions, with_objective=with_objective)
        self._require_cross()
        x = self._clear_padding(x, valid, positions)
        keys = self._clear_padding(keys, keys_valid)
        if keys.shape[0] != x.shape[0]:
            raise ValueError(f"keys (batch size {keys.shape[0]}) must have the batch size of x ({x.shape[0]})")
        weights = self._weights(keys, keys_valid)
        e = self._side(0, x, weights)  # (1, H, B, L, R)
        objective = None
        if with_objective:  # J is the sum of one half for each side
            half_trace = self._trace(weights.used) / 2
            r = self._side(1, keys, weights)  # (1, H, B, M, R)
            halves = ((e, valid), (r, keys_valid))
            left, right = (ksvd_objective(scores, self.lambda_, half_trace, seen) for scores, seen in halves)
            objective = left + right
            for seen in (valid, keys_valid):
                objective = objective if seen is None else objective.masked_fill(~seen.any(1), 0.0)
        hidden = self._merge(e if positions is None else e[:, :, :, positions])
        return AttentionOutput(self._emit(hidden, None if valid is None else select(valid, positions)), objective)

    def _require_cross(self) -> None:
        """Raise a ValueError unless the layer supports cross-attention."""
        if self.causal:
            raise ValueError("keys are for bidirectional layers: a causal layer attends to its own prefix")
        if self.scores != "e":
            raise ValueError(f"cross-attention needs scores='e', not {self.scores!r}: a query has no right score")
        if not self.data_dependent or not isinstance(self.feature_map, CosineMap):
            raise ValueError(
                "cross-attention needs data_dependent=True and the cosine map: otherwise the queries do not see "
                "the keys, or the normalizer of a key is not defined"
            )

    def _side(self, side: int, tokens: Tensor, weights: _Weights) -> Tensor:
        """Scores (1, H, B, L, R) of one side: e of the queries (0), or r of the keys (1)."""
        rows = slice(side * self.width, (side + 1) * self.width)
        bias = self.query_key.bias
        z = F.linear(tokens, self.query_key.weight[rows], None if bias is None else bias[rows])
        phi = self.feature_map(z.unflatten(-1, (1, self.num_heads, self.head_width)), None)  # (B, L, 1, H, P)
        return self._scores(phi, weights._replace(projections=weights.projections[side : side + 1]))

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
        """e, r (2, H, B, M, R), or e alone (1, H, B, M, R) -> ``[e; r]`` or its half, mapped to (B, M, H, P).

        e and r are not concatenated: the linear map is applied in parts, so hooks on ``merge`` do not fire.
        """
        _, H, B, M, _ = scores.shape
        shown = scores[SCORES[self.scores]].to(self.merge.weight.dtype).flatten(1, 3)  # (1 or 2, H B M, R)
        maps = self.merge.weight.split(self.rank, dim=1)  # (P, R) each
        merged = F.linear(shown[0], maps[0], self.merge.bias)  # (H B M, P)
        if self.scores == "both":  # in place: addmm would copy merged first
            merged = merged.addmm_(shown[1].to(merged.dtype), maps[1].T.to(merged.dtype))
        return merged.unflatten(0, (H, B, M)).permute(1, 2, 0, 3)
