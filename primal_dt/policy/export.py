"""A policy as one file: the model with its units, action bounds or choices, and the handling of its history.

A graph is a function without memory. In mode ``window`` it takes the last K steps; in mode ``streaming`` it takes the
newest step and what earlier steps left behind, and returns what the next step needs. All inputs and outputs are in raw
units. :mod:`primal_dt.policy.onnx_runner` runs such a file with numpy and onnxruntime alone.

Axes: E environments, C candidates, N = E C rows, K context steps, T tokens per step, M new tokens, W = TK - 1 tokens of
a window, D width, H heads, P = D / H, S state, A action.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from primal_dt.attention import PrimalState
from primal_dt.data.normalizer import Normalizer
from primal_dt.data.sampler import Batch
from primal_dt.model.critic import TwinCritic
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.folded import FoldedBlock, FoldedSoftmax, fold_blocks
from primal_dt.policy.inference import LAST, InferenceMode, require_mode
from primal_dt.policy.onnx_runner import ENTERING, FORMAT, KEY, LEAVING, STATE
from primal_dt.policy.policy import limits_of
from primal_dt.system.files import atomic_write

__all__ = ["ExportFormat", "StreamingStep", "WindowStep", "export_policy", "make_step", "require_export"]

ExportFormat = Literal["onnx", "torch"]
OPSET = 20
NOT_IN_ONNX: Mapping[str, str] = {
    "reformer": "it sorts tokens, and ONNX has no sort that keeps the order of equal ones",
    "attention_sh": "it sorts real tokens before padding, and ONNX has no sort that keeps the order of equal ones",
}
"""Attention kind -> why it cannot be exported to ONNX."""


def require_export(model: DecisionTransformer, mode: InferenceMode, kind: ExportFormat) -> None:
    """Check that a model can be exported.

    Raises:
        ValueError: with the reason, if it cannot.
    """
    shape = model.shape
    if kind not in ("onnx", "torch"):
        raise ValueError(f"format must be onnx or torch, not {kind!r}")
    require_mode(mode, shape)
    for layer in shape.layer_kinds if kind == "onnx" else ():
        if layer in NOT_IN_ONNX:
            raise ValueError(f"{layer} cannot be exported to ONNX: {NOT_IN_ONNX[layer]}. Use the format torch")
    if kind == "onnx" and "primal" in shape.layer_kinds and shape.feature_map != "cosine":
        raise ValueError(
            f"the {shape.feature_map} map cannot be exported to ONNX, which has no cumulative log-sum-exp. "
            "Use the format torch"
        )
    if mode == "streaming" and shape.context == 1:
        raise ValueError("a context of 1 step has nothing to stream: use mode window")


class PolicyStep(nn.Module):
    """What both modes have in common: units, and the choice among candidates.

    Args:
        model: the trained model.
        normalizer: the normalizer that it was trained with.
        critic: critics that choose among the actions for several targets, if there are any.
    """

    state_mean: Tensor
    state_std: Tensor
    candidates: Tensor

    def __init__(self, model: DecisionTransformer, normalizer: Normalizer, critic: TwinCritic | None = None) -> None:
        super().__init__()
        self.model = model.eval()
        self.shape = model.shape
        self.limits = limits_of(model.shape, normalizer, has_critic=critic is not None)
        self.critic = critic if len(self.limits.candidates) > 1 else None
        self.return_scale = normalizer.return_scale
        self.register_buffer("state_mean", torch.from_numpy(normalizer.state_mean))
        self.register_buffer("state_std", torch.from_numpy(normalizer.state_std))
        self.register_buffer("candidates", torch.tensor(self.limits.candidates))

    def states(self, observations: Tensor) -> Tensor:
        """Raw observations (E, ..., S) -> standardized, repeated for each candidate (N, ..., S)."""
        states = (observations - self.state_mean) / self.state_std
        return states.repeat_interleave(len(self.candidates), dim=0) if len(self.candidates) > 1 else states

    def time(self, timesteps: Tensor) -> Tensor:
        """Timesteps that the model knows."""
        return timesteps.clamp(0, self.shape.max_timesteps - 1)

    def capped(self, predicted: Tensor, timestep: Tensor) -> Tensor:
        """Predicted returns (N, 1) -> those that each candidate follows (N, 1), at most the data's highest."""
        factors = self.candidates.repeat(predicted.shape[0] // len(self.candidates))[:, None]  # (N, 1)
        return torch.minimum(predicted * factors, self.model.return_cap[self.time(timestep)])

    def best(self, states: Tensor, actions: Tensor, followed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose among candidates: states (N, S), actions (N, A), returns (N, 1).

        Returns the actions (E, A), the returns that they follow (E,), and all that were followed (E, C), in raw units.
        """
        C = len(self.candidates)
        returns = (followed * self.return_scale).view(-1, C)  # (E, C)
        if self.critic is None:
            return actions, returns[:, 0], returns
        values = self.critic.least(states, self.model.action_space.encode(actions)).unflatten(0, (-1, C))  # (E, C)
        chosen = values.argmax(1, keepdim=True)  # (E, 1)
        every = actions.unflatten(0, (-1, C))  # (E, C, A)
        best = every.gather(1, chosen[..., None].expand(-1, 1, every.shape[-1]))[:, 0]
        return best, returns.gather(1, chosen)[:, 0], returns


class WindowStep(PolicyStep):
    """The last K steps -> the action: the model's own forward pass, padded on the right as in training."""

    def forward(
        self, observations: Tensor, actions: Tensor, returns_to_go: Tensor, timestep: Tensor, num_steps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the actions of the newest step.

        Args:
            observations: (E, K, S), those of the last steps first, then padding.
            actions: (E, K, A), the actions taken; that of the newest step is ignored.
            returns_to_go: (E, K, C). If the model predicts returns, that of the newest step is ignored.
            timestep: (), that of the newest step.
            num_steps: (), the number of steps that are not padding.

        Returns:
            Actions (E, A), the returns that they follow (E,), and the returns of all candidates (E, C).
        """
        K, C = self.shape.context, len(self.candidates)
        steps = torch.arange(K, device=observations.device)
        states = self.states(observations)  # (N, K, S)
        N = states.shape[0]
        newest = (num_steps - 1).reshape(1)
        batch = Batch(
            states=states,
            actions=actions.repeat_interleave(C, dim=0),
            returns_to_go=(returns_to_go / self.return_scale).transpose(1, 2).reshape(-1, K, 1),
            timesteps=self.time(timestep - num_steps + 1 + steps).expand(N, K),
            valid=(steps < num_steps).expand(N, K),
        )
        followed = batch.returns_to_go.index_select(1, newest)[:, 0]  # (N, 1)
        if self.shape.conditioning == "max-return":  # the prediction does not see the newest return, the action does
            predicted = self.model(batch).best_returns.index_select(1, newest)[:, 0]
            followed = self.capped(predicted, timestep)
            returns = torch.where((steps == newest)[:, None], followed[:, None], batch.returns_to_go)
            batch = Batch(batch.states, batch.actions, returns, batch.timesteps, batch.valid)
        chosen = self.model.step_actions(batch).index_select(1, newest)[:, 0]  # (N, A)
        return self.best(states.index_select(1, newest)[:, 0], chosen, followed)

    def example(self, count: int) -> dict[str, Tensor]:
        """Inputs of ``count`` environments, by name."""
        K, shape = self.shape.context, self.shape
        return {
            "observations": torch.zeros(count, K, shape.state_width),
            "actions": torch.zeros(count, K, shape.action_width),
            "returns_to_go": torch.zeros(count, K, len(self.candidates)),
            "timestep": torch.tensor(0),
            "num_steps": torch.tensor(1),
        }


class StreamingStep(PolicyStep):
    """The newest step and the state of earlier ones -> the action and the new state. Each token is computed once.

    The same function as :class:`~primal_dt.policy.inference.StreamingInference`. A softmax layer has keys and values of
    the window in its state, the newest last, so a step moves them by T places. A primal layer has the sum over the
    window: it takes the T tokens that leave the window and returns the T tokens that enter it, so its cost does not
    depend on K. The caller stores them meanwhile.
    """

    def __init__(self, model: DecisionTransformer, normalizer: Normalizer, critic: TwinCritic | None = None) -> None:
        super().__init__(model, normalizer, critic)
        self.blocks = nn.ModuleList(fold_blocks(model.blocks))

    def forward(
        self,
        observation: Tensor,
        last_action: Tensor,
        return_to_go: Tensor,
        timestep: Tensor,
        state: list[Tensor],
        leaving: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Compute the actions of the newest step.

        Args:
            observation: (E, S).
            last_action: (E, A), the actions of the step before; ignored at timestep 0.
            return_to_go: (E, C); ignored if the model predicts returns.
            timestep: (), that of this step.
            state: (N, ...) each, zero at timestep 0: for each softmax layer keys and values (N, H, W, P), for each
                primal layer the sum of its tokens (N, D).
            leaving: (N, T, D) for each primal layer. Count the tokens that enter it from 0: at step t those are number
                Tt to Tt + T - 1, and those that leave number T(t - K) + 1 to T(t - K) + T, zero before step K.

        Returns:
            Actions (E, A), the returns that they follow (E,), the returns of all candidates (E, C), the new state, and
            the entering tokens (N, T, D) of each primal layer.
        """
        T, C = self.shape.tokens_per_step, len(self.candidates)
        of_layers, tokens = iter(state), iter(leaving)
        memories = [_Memory(block, of_layers, tokens, T) for block in self.blocks if isinstance(block, FoldedBlock)]
        states = self.states(observation)  # (N, S)
        values = {
            "action": last_action.repeat_interleave(C, dim=0) if C > 1 else last_action,
            "return": (return_to_go / self.return_scale).reshape(-1, 1),
            "state": states,
        }
        kinds = ("action", *self.shape.kinds[: T - 1])
        if self.shape.conditioning == "max-return":
            x = self._tokens(kinds[:-1], values, timestep)
            at_state = self._newest(x, 0, timestep, memories)  # (N, D)
            values["return"] = self.capped(self.model.return_head(at_state), timestep)
            x = self._newest(self._tokens(kinds[-1:], values, timestep), T - 1, timestep, memories)
        else:
            x = self._newest(self._tokens(kinds, values, timestep), 0, timestep, memories)
        action, followed, returns = self.best(states, self.model.actions_at(x), values["return"])
        after = [part for memory in memories for part in memory.state]
        entering = [torch.cat(memory.entering, 1) for memory in memories if memory.entering]
        return action, followed, returns, after, entering

    def _tokens(self, kinds: tuple[str, ...], values: Mapping[str, Tensor], timestep: Tensor) -> Tensor:
        """Embed new tokens: (N, M, D). The first action, which does not exist, is any finite token."""
        model, tokens = self.model, []
        for kind in kinds:
            time = model.embed_timestep(self.time(timestep - int(kind == "action")))  # (D,)
            tokens.append(model.embed(kind, values[kind]) + time)
        return model.embed_norm(torch.stack(tokens, dim=1))

    def _newest(self, x: Tensor, first: int, timestep: Tensor, memories: "list[_Memory]") -> Tensor:
        """New tokens (N, M, D), from number ``first`` of the step -> the last block's output at the newest (N, D)."""
        T, K = self.shape.tokens_per_step, self.shape.context
        W, M = T * K - 1, x.shape[1]
        kept = (T * timestep - 1).clamp(0, W - T)  # real tokens of earlier steps in the window
        is_first = (timestep == 0).to(kept.dtype)
        own = W - T + first + torch.arange(M, device=x.device)[:, None]  # (M, 1), places of the new tokens
        place = torch.arange(W - T + first + M, device=x.device)  # (places,)
        # A token sees the real tokens up to its own. The one that is not real, the first action, sees only itself.
        seen = ((place >= W - T - kept + is_first) & (place <= own)) | (place == own)
        is_real = (own[:, 0] > W - T) | (timestep > 0)  # (M,)
        before = kept + first - is_first * min(first, 1)  # real tokens before the new ones
        for memory in memories:
            positions = LAST if memory is memories[-1] else None
            hidden = memory.attend(memory.block.attention_norm(x), seen, is_real, before, positions)
            x = memory.block.finish(x if positions is None else x[:, LAST], hidden)
        return x[:, -1]

    def example(self, count: int) -> dict[str, Any]:
        """Inputs of ``count`` environments at timestep 0, by name."""
        shape, C = self.shape, len(self.candidates)
        N, W, state, leaving = count * C, shape.tokens_per_step * shape.context - 1, [], []
        for kind in shape.layer_kinds:
            if kind == "softmax":
                state += [torch.zeros(N, shape.num_heads, W, shape.width // shape.num_heads) for _ in range(2)]
            else:
                state.append(torch.zeros(N, shape.width))
                leaving.append(torch.zeros(N, shape.tokens_per_step, shape.width))
        return {
            "observation": torch.zeros(count, shape.state_width),
            "last_action": torch.zeros(count, shape.action_width),
            "return_to_go": torch.zeros(count, C),
            "timestep": torch.tensor(0),
            "state": state,
            "leaving": leaving,
        }


class _Memory:
    """A block, and what its layer knows of the tokens that stay in the window."""

    def __init__(
        self, block: FoldedBlock, state: Iterator[Tensor], leaving: Iterator[Tensor], num_leaving: int
    ) -> None:
        self.block = block
        self.state: list[Tensor]
        """Keys and values (N, H, places, P), or the sum of the tokens (N, D)."""
        self.entering: list[Tensor] = []
        """The tokens (N, M, D) that a primal layer has seen in this step, in parts."""
        if isinstance(block.attention, FoldedSoftmax):
            self.state = [next(state)[:, :, num_leaving:], next(state)[:, :, num_leaving:]]
        else:
            self.state = [next(state) - next(leaving).sum(1)]

    def attend(self, x: Tensor, seen: Tensor, is_real: Tensor, before: Tensor, positions: slice | None) -> Tensor:
        """New tokens (N, M, D), normalized -> the layer's output at all of them or the last (N, M, D).

        Args:
            x: the tokens.
            seen: (M, places) bool, the places that each token attends to.
            is_real: (M,) bool, False for the first action.
            before: (), the number of real tokens before these in the window.
            positions: None or the last.
        """
        layer = self.block.attention
        if isinstance(layer, FoldedSoftmax):
            q, k, v = layer.project(x)
            keys, values = self.state = [torch.cat(pair, 2) for pair in zip(self.state, (k, v), strict=True)]
            if positions is not None:
                q, seen = q[:, :, positions], seen[positions]
            return layer.attend(q, keys, values, seen=seen)
        x = x * is_real[:, None]
        self.entering.append(x)
        past = PrimalState(self.state[0], before.reshape(1), None)
        hidden, after = layer.advance(x, past, is_real[None], positions=positions)
        self.state = [after.total]
        return hidden


def make_step(
    model: DecisionTransformer, normalizer: Normalizer, critic: TwinCritic | None, mode: InferenceMode
) -> WindowStep | StreamingStep:
    """Build the function of a mode, in evaluation mode, on the CPU."""
    kinds: dict[str, type[WindowStep | StreamingStep]] = {"window": WindowStep, "streaming": StreamingStep}
    return kinds[mode](model, normalizer, critic).cpu().float().eval()


def export_policy(
    path: Path,
    model: DecisionTransformer,
    normalizer: Normalizer,
    *,
    critic: TwinCritic | None = None,
    mode: InferenceMode = "window",
    format: ExportFormat = "onnx",  # noqa: A002 - the flag's name
    about: Mapping[str, Any],
) -> None:
    """Write a policy as one file, atomically.

    Args:
        path: the file.
        model: the trained model.
        normalizer: the normalizer that it was trained with.
        critic: critics that choose among actions, if there are any.
        mode: ``window`` or ``streaming``.
        format: ``onnx``, or ``torch`` for a file of ``torch.export``.
        about: what the file says of itself in addition to what a runner needs: plain values.

    Raises:
        ValueError: if the model cannot be exported.
        ImportError: if the extra ``export`` is not installed.
    """
    require_export(model, mode, format)
    step = make_step(model, normalizer, critic, mode)
    metadata = {
        "format": FORMAT,
        "mode": mode,
        "context": model.shape.context,
        "predicts_returns": model.shape.conditioning == "max-return",
        "limits": asdict(step.limits),
        "about": dict(about),
    }
    example: dict[str, Any] = step.example(2)  # torch would take a batch of 1 for a constant
    batch = torch.export.Dim("batch")
    rows = len(step.limits.candidates) * batch if len(step.limits.candidates) > 1 else batch
    shapes = {
        name: [{0: rows} for _ in value] if isinstance(value, list) else {0: batch} if value.dim() else {}
        for name, value in example.items()
    }
    with torch.no_grad():
        program = torch.export.export(step, (), example, dynamic_shapes=shapes)
    if format == "torch":
        with atomic_write(path) as file:
            torch.export.save(program, file, extra_files={f"{KEY}.json": json.dumps(metadata)})
    else:
        with atomic_write(path) as file:
            file.write(_onnx_bytes(program, example, metadata))


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hide what the exporter says of its own parts: deprecated functions, optional packages, skipped optimizations."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _onnx_bytes(program: Any, example: Mapping[str, Any], metadata: Mapping[str, Any]) -> bytes:
    states, leaving, entering = (
        [f"{name}{i}" for i in range(len(example.get(key, ())))]
        for name, key in ((STATE, "state"), (LEAVING, "leaving"), (ENTERING, "leaving"))
    )
    names = [name for name, value in example.items() if isinstance(value, Tensor)] + states + leaving
    with _quiet_exporter():
        exported = torch.onnx.export(
            program,
            input_names=names,
            output_names=["action", "followed_return", "returns", *(f"next_{name}" for name in states), *entering],
            opset_version=OPSET,
            dynamo=True,
            optimize=True,
            verbose=False,
        )
    assert exported is not None
    proto = exported.model_proto
    proto.producer_name = "primal-dt"
    proto.doc_string = "A policy of primal-dt; how to run it: primal_dt/policy/onnx_runner.py"
    entry = proto.metadata_props.add()
    entry.key, entry.value = KEY, json.dumps(metadata)
    return proto.SerializeToString()
