"""Causal Primal-Attention for autoregressive models: in parallel over a sequence, or token by token.

Axes: B batch, L tokens, H heads, D width, P = D / H, M new tokens, W tokens of a window.
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from primal_dt.attention.feature_maps import ExponentialMap
from primal_dt.attention.layer import Positions, at_least_float32, check_mask, check_tensor, select
from primal_dt.attention.primal import FeatureMapName, PrimalAttention, PrimalInit, ScoreNames

__all__ = ["CausalPrimalAttention", "PrimalState", "PrimalWindow"]


class PrimalState(NamedTuple):
    """State of Causal Primal-Attention after a prefix: O(D) numbers, independent of the prefix length."""

    total: Tensor
    """(B, D), the sum of the tokens so far."""
    num_tokens: Tensor
    """(B,), the number of tokens so far."""
    log_key_sum: Tensor | None
    """(B, H, P), the logarithm of the sum of the key features so far. None for the cosine map."""

    def without(self, tokens: Tensor) -> "PrimalState":
        """Remove tokens (B, M, D) from the state, for a running mean over the newest tokens only.

        Cosine map only: the exponential map's ``log_key_sum`` does not allow removing a token.
        """
        if self.log_key_sum is not None:
            raise ValueError("tokens cannot be removed from a state of the exponential map: use step_window")
        return PrimalState(self.total - tokens.sum(1), self.num_tokens - tokens.shape[1], None)


class PrimalWindow(NamedTuple):
    """The last W tokens of each sequence, in a ring buffer."""

    ring: Tensor
    """(B, W, D), token number t in slot t modulo W."""
    num_tokens: Tensor
    """(B,), the number of tokens so far."""


class CausalPrimalAttention(PrimalAttention):
    """Primal-Attention on prefix means: ``q_i = W_q x_bar_i``, ``k_i = W_k x_bar_i``, ``x_bar_i = mean_{j <= i} x_j``.

    The paper takes the mean of the queries and of the keys up to each position. A mean commutes with the affine
    projections, so this layer takes the mean of its input instead. It needs one running sum instead of two, and
    projects only where outputs are needed. Means run over valid tokens.

    The weights are data-independent: data-dependent weights would be built from future tokens.

    The arguments are those of :class:`PrimalAttention`, without ``rank_multi`` and ``max_rows``. Setting
    ``data_dependent`` raises a ValueError.
    """

    _causal: ClassVar[bool] = True

    def __init__(
        self,
        *,
        width: int,
        num_heads: int,
        rank: int = 32,
        feature_map: FeatureMapName = "cosine",
        data_dependent: bool = False,
        scores: ScoreNames = "both",
        init: PrimalInit = "unit",
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        if data_dependent:
            raise ValueError(
                "data_dependent=True is for PrimalAttention only: weights built from the whole sequence "
                "would let a causal layer see the future"
            )
        super().__init__(
            width=width,
            num_heads=num_heads,
            rank=rank,
            feature_map=feature_map,
            data_dependent=False,
            scores=scores,
            init=init,
            dropout=dropout,
            bias=bias,
        )

    def initial_state(self, batch_size: int) -> PrimalState:
        """The state before the first token of each sequence."""
        weight = self.query_key.weight
        dtype = at_least_float32(weight.dtype)
        log_key_sum = None
        if isinstance(self.feature_map, ExponentialMap):
            shape = (batch_size, self.num_heads, self.head_width)
            log_key_sum = weight.new_full(shape, float("-inf"), dtype=dtype)
        return PrimalState(
            total=weight.new_zeros(batch_size, self.width, dtype=dtype),
            num_tokens=weight.new_zeros(batch_size, dtype=torch.int64),
            log_key_sum=log_key_sum,
        )

    def step(self, x: Tensor, state: PrimalState, valid: Tensor | None = None) -> tuple[Tensor, PrimalState]:
        """Process one more token. The output equals that of :meth:`forward` at this token.

        The cost does not depend on the number of past tokens.

        Args:
            x: (B, D), the next token of each sequence.
            state: from :meth:`initial_state` or the previous step.
            valid: (B,) bool, True for real tokens; None if all are real. At padding the state is unchanged and the
                output zero.

        Returns:
            The output (B, D) and the new state.
        """
        x, seen = self._clear_token(x, valid)  # (B, D), (B,)
        hidden, state = self._advance(x[:, None], seen[:, None], state, None)
        return hidden[:, 0], state

    def advance(
        self, x: Tensor, state: PrimalState, valid: Tensor | None = None, *, positions: Positions = None
    ) -> tuple[Tensor, PrimalState]:
        """Process M more tokens. The outputs equal those of :meth:`forward` at these tokens.

        Args:
            x: (B, M, D), the next tokens of each sequence.
            state: from :meth:`initial_state` or the previous call.
            valid: (B, M) bool, True for real tokens; None if all are real.
            positions: which of the M tokens to compute outputs for.

        Returns:
            The outputs (B, M, D), or fewer with ``positions``, and the new state.
        """
        x = self._clear_padding(x, valid, positions)
        seen = x.new_ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        return self._advance(x, seen, state, positions)

    def _advance(self, x: Tensor, seen: Tensor, state: PrimalState, positions: Positions) -> tuple[Tensor, PrimalState]:
        """Process tokens x (B, M, D), whose padding is cleared; seen (B, M) is True for real tokens."""
        if not isinstance(state, PrimalState):
            raise TypeError(f"state must be a PrimalState, as returned by initial_state, not {type(state).__name__}")
        self._check_fit("state", state.total.shape, (x.shape[0], x.shape[2]))
        log_key_sum = state.log_key_sum
        if (log_key_sum is None) == isinstance(self.feature_map, ExponentialMap):
            raise ValueError("state is from a layer with another feature map: start from this layer's initial_state")
        total = state.total[:, None] + x.cumsum(1, dtype=state.total.dtype)  # (B, M, D)
        count = state.num_tokens[:, None] + seen.cumsum(1)  # (B, M)
        context = (total / count.clamp(min=1)[..., None]).to(x.dtype)  # (B, M, D)
        if isinstance(self.feature_map, ExponentialMap) and log_key_sum is not None:
            log_g = self.feature_map.log_features(self._queries_and_keys(context))  # (B, M, 2, H, P)
            log_keys = log_g[:, :, 1].masked_fill(~seen[..., None, None], float("-inf"))  # (B, M, H, P)
            log_key_sums = torch.cat((log_key_sum[:, None], log_keys), 1).logcumsumexp(1)[:, 1:]  # (B, M, H, P)
            phi = select(self.feature_map.normalized(log_g, log_key_sums), positions)
            log_key_sum = log_key_sums[:, -1]
        else:
            phi = self._features(select(context, positions), None)  # (B, M, 2, H, P)
        hidden = self._emit(self._merge(self._scores(phi, self._weights(context, None))), select(seen, positions))
        return hidden, PrimalState(total[:, -1], count[:, -1], log_key_sum)

    def initial_window(self, batch_size: int, window: int) -> PrimalWindow:
        """An empty ring of ``window`` tokens for each sequence."""
        if window < 1:
            raise ValueError(f"window ({window}) must be at least 1")
        weight = self.query_key.weight
        return PrimalWindow(
            ring=weight.new_zeros(batch_size, window, self.width),
            num_tokens=weight.new_zeros(batch_size, dtype=torch.int64),
        )

    def step_window(self, x: Tensor, window: PrimalWindow, valid: Tensor | None = None) -> tuple[Tensor, PrimalWindow]:
        """Process one more token, using the last W tokens only.

        The output equals that of :meth:`forward` on those W tokens, at the last of them. Costs more than :meth:`step`:
        every call sums the W tokens again (a running sum that subtracts leaving tokens would drift) and, with the
        exponential map, computes the features of all W.

        Args:
            x: (B, D), the next token of each sequence.
            window: from :meth:`initial_window` or the previous step.
            valid: (B,) bool, as for :meth:`step`.

        Returns:
            The output (B, D) and the new window.
        """
        if not isinstance(window, PrimalWindow):
            raise TypeError(
                f"window must be a PrimalWindow, as returned by initial_window, not {type(window).__name__}"
            )
        x, seen = self._clear_token(x, valid)
        ring, count = window
        self._check_fit("window", (ring.shape[0], ring.shape[2]), x.shape)
        W = ring.shape[1]
        age = torch.arange(W - 1, -1, -1, device=ring.device)  # (W,), the ages of the tokens, oldest first
        slot = (count % W)[:, None]  # (B, 1)
        is_slot = torch.arange(W, device=ring.device) == slot  # (B, W)
        ring = torch.where((is_slot & seen[:, None])[..., None], x[:, None].to(ring.dtype), ring)
        count = count + seen
        newest = count[:, None] - 1  # (B, 1)
        tokens = ring.take_along_dim(((newest - age) % W)[..., None], 1)  # (B, W, D)
        hidden = self.forward(tokens, newest >= age, positions=slice(-1, None)).hidden[:, 0]
        return hidden.masked_fill(~seen[:, None], 0.0), PrimalWindow(ring, count)

    def _context(self, x: Tensor, valid: Tensor | None) -> Tensor:
        total = x.cumsum(1, dtype=at_least_float32(x.dtype))  # (B, L, D)
        if valid is None:
            count = torch.arange(1, x.shape[1] + 1, device=x.device)[None]  # (1, L)
        else:
            count = valid.cumsum(1).clamp(min=1)  # (B, L)
        return total.div_(count[..., None]).to(x.dtype)  # in place: nothing else reads the sums

    def _clear_token(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Check the arguments of a step; return x (B, D) with padding cleared, and the mask of real tokens (B,)."""
        check_tensor("x", x)
        if x.dim() != 2 or x.shape[1] != self.width:
            raise ValueError(f"x must have shape (batch, width {self.width}), not {tuple(x.shape)}")
        if valid is None:
            return x, torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
        check_mask(valid, (x.shape[0],))
        return x.masked_fill(~valid[:, None], 0.0), valid

    def _check_fit(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ValueError(
                f"{name} has batch size {shape[0]} and width {shape[1]}, but x has batch size {expected[0]} and "
                f"width {expected[1]}: start from this layer's initial_{name}"
            )
