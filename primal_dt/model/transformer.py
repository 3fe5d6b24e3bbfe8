"""The Decision Transformer: predicts actions from returns-to-go, states and actions.

Axes: B batch, K context steps, T tokens per step, L = TK tokens, M chosen tokens, D width, S state, A action.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from primal_dt.attention import CAUSAL_KINDS, AttentionLayer, Positions, build_attention
from primal_dt.attention.dropout import Dropout
from primal_dt.data.sampler import Batch
from primal_dt.model.actions import ActionSpace, BoxActions, CategoricalActions

__all__ = ["ATTENTION_STACKS", "ActionLoss", "Conditioning", "DecisionTransformer", "ModelOutput", "ModelShape"]

Conditioning = Literal["return", "none", "max-return"]
ActionLoss = Literal["mse", "gaussian"]

PRIMAL_PLUS, PRIMALFORMER = "primal-plus", "primalformer"
ATTENTION_STACKS = (PRIMAL_PLUS, PRIMALFORMER, *(kind for kind in CAUSAL_KINDS if kind != "primal"))
"""Names of the attention stacks. ``primal-plus`` has Causal Primal-Attention in the top layer and softmax attention
below. ``primalformer`` has Causal Primal-Attention in all layers. The others have one kind in all layers; ``softmax``
is the canonical Decision Transformer."""

LAYOUTS: Mapping[Conditioning, tuple[str, ...]] = {
    "return": ("return", "state", "action"),
    "none": ("state", "action"),
    "max-return": ("state", "return", "action"),
}
LOG_STD_RANGE = (-4.0, 1.0)
"""Range of the logarithm of an action's standard deviation, divided by the radius of the action box."""


class ModelOutput(NamedTuple):
    """The model's output for a batch."""

    actions: Tensor
    """(B, K, F), the predicted actions: within the action box, or the probability of each choice."""
    objectives: dict[int, Tensor]
    """Layer index -> J (B,), for layers that have one; empty if J was not requested."""
    encoded: Tensor | None = None
    """(B, K, F), the batch's actions in the same form as the prediction, where that differs from the actions."""
    logits: tuple[Tensor, ...] = ()
    """Unnormalized log-probabilities of the choices, (B, K, choices) for each entry of a categorical action."""
    log_std: Tensor | None = None
    """(B, K, A), logarithm of the standard deviation of each action, with ``action_loss="gaussian"``."""
    best_returns: Tensor | None = None
    """(B, K, 1), predicted best returns-to-go, scaled, with ``conditioning="max-return"``."""


@dataclass(frozen=True)
class ModelShape:
    """Everything needed to build a model; part of every checkpoint."""

    state_width: int
    """S, the number of state entries."""
    action_low: tuple[float, ...]
    """(A,), the lower bounds of the action box. Empty if actions are choices."""
    action_high: tuple[float, ...]
    """(A,), the upper bounds of the action box. Empty if actions are choices."""
    attention: str = PRIMAL_PLUS
    """One of ``ATTENTION_STACKS``."""
    width: int = 128
    """D, the width of the tokens."""
    num_heads: int = 1
    num_layers: int = 3
    context: int = 20
    """K, the maximum number of steps in a window."""
    rank: int = 32
    """R, the number of projection directions of a primal layer."""
    dropout: float = 0.1
    max_timesteps: int = 1000
    """Maximum number of timesteps in an episode."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights of softmax layers."""
    feature_map: Literal["cosine", "exponential"] = "cosine"
    """Feature map of the primal layers."""
    scores: Literal["both", "e", "r"] = "both"
    """Scores that the output of a primal layer is made of."""
    init: Literal["published", "small"] = "published"
    """Start of the weights, see :meth:`DecisionTransformer.reset_parameters`."""
    primal_init: Literal["unit", "orthonormal"] = "unit"
    """Start of W_e and W_r, see :class:`PrimalAttention`."""
    conditioning: Conditioning = "return"
    """What actions depend on in addition to the history: a given return-to-go, nothing, or a predicted one."""
    action_loss: ActionLoss = "mse"
    """Whether the model predicts actions only, or also their standard deviations."""
    action_dropout: float = 0.0
    """Probability with which a training window hides its past actions."""
    unbounded: tuple[bool, ...] = ()
    """(A,), True for entries of an action without bounds: their ``action_low`` and ``action_high`` are the data's mean
    minus and plus its standard deviation. If empty: all have bounds."""
    categories: tuple[int, ...] = ()
    """(A,), the number of choices of each entry, if actions are choices."""

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION_STACKS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION_STACKS)}, not {self.attention!r}")
        for name in ("state_width", "width", "num_heads", "num_layers", "context", "rank", "max_timesteps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.width % self.num_heads:
            raise ValueError(f"width ({self.width}) must be divisible by num_heads ({self.num_heads})")
        for name in ("dropout", "attention_dropout", "action_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0 and below 1")
        choices = {"init": ("published", "small"), "conditioning": get_args(Conditioning)}
        choices |= {"action_loss": get_args(ActionLoss)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.categories:
            if self.action_low or self.action_high or self.unbounded or min(self.categories) < 1:
                raise ValueError(
                    f"actions that are choices ({self.categories}) must have no bounds, and one choice each"
                )
            if self.action_loss != "mse":
                raise ValueError(f"action_loss {self.action_loss} is for continuous actions: choices have a likelihood")
            return
        if len(self.action_low) != len(self.action_high) or not self.action_low:
            raise ValueError(
                f"action_low (length {len(self.action_low)}) and action_high (length {len(self.action_high)}) "
                "must have the same length, at least 1"
            )
        if self.unbounded and len(self.unbounded) != len(self.action_low):
            raise ValueError(f"unbounded must have one entry for each of {len(self.action_low)}, not {self.unbounded}")
        if any(low >= high for low, high in zip(self.action_low, self.action_high, strict=True)):
            raise ValueError(f"every action_low {self.action_low} must be below its action_high {self.action_high}")

    @property
    def action_width(self) -> int:
        """A, the number of action entries."""
        return len(self.categories or self.action_low)

    def action_space(self) -> ActionSpace:
        """Build the action space."""
        if self.categories:
            return CategoricalActions(self.categories)
        return BoxActions(self.action_low, self.action_high, self.unbounded)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of a step's tokens, in order. The action is predicted at the last token before it."""
        return LAYOUTS[self.conditioning]

    @property
    def tokens_per_step(self) -> int:
        """T, the number of tokens of a step."""
        return len(self.kinds)

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The attention kind of each layer, from bottom to top."""
        if self.attention == PRIMAL_PLUS:
            return ("softmax",) * (self.num_layers - 1) + ("primal",)
        return ("primal" if self.attention == PRIMALFORMER else self.attention,) * self.num_layers


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, kind: str, shape: ModelShape) -> None:
        super().__init__()
        options: dict[str, Any] = {}
        if kind == "softmax":  # windows are padded on the right
            options = {"right_padded": True, "attention_dropout": shape.attention_dropout}
        if kind == "primal":
            options = {"rank": shape.rank, "feature_map": shape.feature_map, "scores": shape.scores}
            options["init"] = shape.primal_init
        if kind == "cosformer":
            options["horizon"] = shape.tokens_per_step * shape.context
        width = shape.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = build_attention(
            kind, width=width, num_heads=shape.num_heads, causal=True, dropout=shape.dropout, **options
        )
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Linear(4 * width, width), Dropout(shape.dropout)
        )

    def forward(
        self, x: Tensor, valid: Tensor | None, *, positions: Positions = None, with_objective: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(B, L, D) -> (B, M, D) at the chosen positions, and J (B,) if the layer has one and it is requested."""
        hidden, objective = self.attention(
            self.attention_norm(x), valid, positions=positions, with_objective=with_objective
        )
        if positions is not None:
            x = x[:, positions]
        return self.finish(x, hidden), objective

    def finish(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Complete the block after attention: input x and attention output, (B, M, D) each -> (B, M, D)."""
        x = x + hidden
        # Two axes: with three, the in-place ReLU would get a view as its input, which costs a copy.
        rows = self.mlp_norm(x).flatten(0, -2)
        return x + self.mlp(rows).view_as(x)


class DecisionTransformer(nn.Module):
    """Tokens (R_1, s_1, a_1, ...) -> the action at each state, from the tokens before the state and the state itself.

    Each kind of token has a linear embedding, plus a timestep embedding that the tokens of a step share. A LayerNorm
    and a causal transformer follow. The action at a state token is ``center + radius * tanh(linear(x))``, which is
    within the action box. The top block is computed only at the tokens whose output is used. There is no positional
    embedding other than the timestep's.

    With ``conditioning="max-return"`` the tokens are (s_1, R_1, a_1, ...), after Reinformer (arXiv 2405.08740): a head
    (LayerNorm and linear) predicts R_t at s_t, and the action is predicted at R_t. With ``conditioning="none"`` the
    tokens are (s_1, a_1, ...): behavior cloning.

    With ``action_loss="gaussian"`` a second linear head predicts the logarithm of each action's standard deviation.

    With ``primal-plus`` this is Primal.+DT of the Primal-Attention paper (arXiv 2305.19798). Differences from its
    published code: padding is on the right instead of the left, and does not count in the primal layer's means and J;
    the heads for the next state and return, which the published code builds and does not train, are absent.

    Args:
        shape: the sizes and the attention stack.
    """

    return_cap: Tensor
    """(max_timesteps,), with ``conditioning="max-return"``: maximum of a predicted return-to-go by timestep, scaled."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        if shape.conditioning != "none":
            self.embed_return = nn.Linear(1, shape.width)
        self.embed_state = nn.Linear(shape.state_width, shape.width)
        self.action_space = shape.action_space()
        self.embed_action = nn.Linear(self.action_space.num_features, shape.width)
        self.embed_timestep = nn.Embedding(shape.max_timesteps, shape.width)
        self.embed_norm = nn.LayerNorm(shape.width)
        self.embed_dropout = Dropout(shape.dropout)
        self.action_dropout = Dropout(shape.action_dropout)
        self.blocks = nn.ModuleList(Block(kind, shape) for kind in shape.layer_kinds)
        self.final_norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, self.action_space.num_outputs)
        if shape.conditioning == "max-return":
            self.return_head = nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, 1))
            self.register_buffer("return_cap", torch.full((shape.max_timesteps,), torch.inf))
        if shape.action_loss == "gaussian":
            self.log_std_head = nn.Linear(shape.width, shape.action_width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the linear maps and the timestep table. Called once, after the parts have initialized themselves.

        With ``init="published"``, as in the published code of the Decision Transformer and of Primal-Attention: linear
        maps in the blocks, those of attention included, are normal with standard deviation 0.02 and have zero biases,
        as in GPT-2. Embeddings and action head keep torch's defaults: the timestep table is normal(0, 1), so time makes
        up about three quarters of the variance of a state token.

        With ``init="small"``, everything outside the attention layers is normal with standard deviation 0.02, and
        linear maps inside them keep torch's defaults.
        """
        if self.shape.init == "published":
            chosen = set(self.blocks.modules())
        else:
            layers = [module for module in self.modules() if isinstance(module, AttentionLayer)]
            chosen = set(self.modules()) - {module for layer in layers for module in layer.modules()}
        for module in self.modules():  # in order, so that a seed gives the same weights
            if module in chosen and isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if module in chosen and isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, batch: Batch, *, with_objective: bool = False) -> ModelOutput:
        """Predict the action at every step.

        Args:
            batch: windows of at most K steps, padded on the right. The action of a step may hold any finite value: the
                model does not see it at that step.
            with_objective: also return J of the layers that have one.

        Returns:
            The actions (B, K, A), J (B,) by layer, and what else the model predicts.
        """
        self._check_batch(batch)
        valid = batch.valid.repeat_interleave(self.shape.tokens_per_step, dim=1)  # (B, L)
        x = self.tokens(batch)  # (B, L, D)
        objectives: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            top = number == len(self.blocks) - 1
            x, objective = block(
                x, valid, positions=self._used_positions(valid) if top else None, with_objective=with_objective
            )  # (B, L, D), from the top block (B, M, D)
            if objective is not None:
                objectives[number] = objective
        best = None
        if self.shape.conditioning == "max-return":
            at_states, x = x.unflatten(1, (-1, 2)).unbind(2)  # (B, K, D) each
            best = self.return_head(at_states)  # (B, K, 1)
        log_std = self.log_std_at(x) if self.shape.action_loss == "gaussian" else None  # (B, K, A)
        space, outputs = self.action_space, self.head(self.final_norm(x))  # (B, K, O)
        output = ModelOutput(space.predict(outputs), objectives, log_std=log_std, best_returns=best)
        if not isinstance(space, CategoricalActions):
            return output
        encoded = space.encode(batch.actions.masked_fill(~batch.valid[..., None], 0.0))
        return output._replace(encoded=encoded, logits=space.split(outputs))

    def tokens(self, batch: Batch) -> Tensor:
        """(B, L, D), the embedded sequence of returns-to-go (if they are tokens), states and actions."""
        padding = ~batch.valid[..., None]  # (B, K, 1), cleared: a NaN there would reach the gradients of the embeddings
        time = self.embed_timestep(batch.timesteps.masked_fill(~batch.valid, 0))  # (B, K, D)
        actions = self.action_space.encode(batch.actions.masked_fill(padding, 0.0))  # (B, K, F)
        if self.training and self.shape.action_dropout:
            actions = actions * (self.action_dropout(actions.new_ones(len(actions), 1, 1)) > 0)
        values = {
            "return": batch.returns_to_go.masked_fill(padding, 0.0),
            "state": batch.states.masked_fill(padding, 0.0),
            "action": actions,
        }
        tokens = [self._embed(kind, values[kind]) + time for kind in self.shape.kinds]
        interleaved = torch.stack(tokens, dim=2).flatten(1, 2)  # (B, K, T, D) -> (B, L, D)
        return self.embed_dropout(self.embed_norm(interleaved))

    def embed(self, kind: str, values: Tensor) -> Tensor:
        """Embed returns-to-go (..., 1), states (..., S) or actions (..., A), by the name of their kind: (..., D)."""
        return self._embed(kind, self.action_space.encode(values) if kind == "action" else values)

    def _embed(self, kind: str, values: Tensor) -> Tensor:
        """Embed returns-to-go, states or encoded actions."""
        if kind == "return":
            return self.embed_return(values)
        return self.embed_state(values) if kind == "state" else self.embed_action(values)

    def _used_positions(self, valid: Tensor) -> Positions:
        """The tokens whose output is used: those at which actions are predicted, and with max-return the states."""
        last = self.shape.tokens_per_step
        if self.shape.conditioning != "max-return":
            return slice(last - 2, None, last)
        positions = torch.arange(valid.shape[1], device=valid.device).unflatten(0, (-1, last))  # (K, T)
        return positions[:, :2].flatten()

    def _check_batch(self, batch: Batch) -> None:
        # On a GPU these checks would make the host wait. There, the caller must ensure that the batch is valid.
        if batch.valid.device.type != "cpu" or torch.compiler.is_compiling():
            return
        first, last = map(int, batch.timesteps.masked_fill(~batch.valid, 0).aminmax())
        if first < 0 or last >= self.shape.max_timesteps:
            raise ValueError(
                f"timestep {first if first < 0 else last} must be from 0 to {self.shape.max_timesteps - 1}: "
                f"episodes must not be longer than max_timesteps ({self.shape.max_timesteps})"
            )
        if bool((batch.valid[:, 1:] > batch.valid[:, :-1]).any()):
            raise ValueError(
                "a window has padding before a valid step: padding must be on the right, after all valid steps"
            )

    def log_std_at(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., A), logarithms of the standard deviations of actions."""
        low, high = LOG_STD_RANGE
        scaled = (low + high) / 2 + (high - low) / 2 * torch.tanh(self.log_std_head(self.final_norm(x)))
        assert isinstance(self.action_space, BoxActions)
        return scaled + self.action_space.radius.log()

    def step_actions(self, batch: Batch) -> Tensor:
        """(B, K, A), the actions that a policy takes at each step of the windows."""
        actions = self(batch).actions
        if not isinstance(self.action_space, CategoricalActions):
            return actions
        parts = actions.split(self.action_space.categories, dim=-1)  # probabilities of the choices of each entry
        return torch.stack([part.argmax(-1) for part in parts], dim=-1).to(actions.dtype)

    def actions_at(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., A), the actions that a policy takes."""
        return self.action_space.decode(self.head(self.final_norm(x)))

    def num_parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
