"""Run an exported policy from a file of ``torch.export``.

from primal_dt.policy.torch_runner import TorchExportPolicy

policy = TorchExportPolicy("policy.pt2")
policy.reset(3600.0)
action = policy.act(observation)
policy.observe(reward)
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from primal_dt.policy.exported import Arrays, ExportedPolicy
from primal_dt.policy.exported_file import KEY, Shape, read_stated
from primal_dt.policy.stepwise import OnBad, PastEnd

__all__ = ["MEMORY", "TorchExportPolicy", "TorchGraph"]

MEMORY = "memory"
"""The input of the function that is the list of what its layers remember."""


class TorchExportPolicy(ExportedPolicy):
    """A file of ``torch.export`` as a policy; :class:`~primal_dt.policy.stepwise.StepwisePolicy` describes its calls.

    Args:
        path: the file that ``export.py --format torch`` has written.
        on_bad: ``error`` or ``hold``, see :class:`~primal_dt.policy.stepwise.StepwisePolicy`.
        past_end: ``clamp`` or ``error``, see there.

    Raises:
        ValueError: if the file is not an exported policy of this version.
    """

    def __init__(self, path: str | Path, *, on_bad: OnBad = "error", past_end: PastEnd = "clamp") -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no exported policy {path}")
        files = {f"{KEY}.json": ""}
        try:
            program = torch.export.load(path, extra_files=files)
        except Exception as error:  # torch raises many types of errors for foreign bytes
            raise ValueError(f"{path} is not a file of torch.export: {str(error).splitlines()[0]}") from error
        assert program.example_inputs is not None
        _, example = program.example_inputs
        graph = TorchGraph(str(path), files[f"{KEY}.json"] or None, program.module(), example)
        super().__init__(graph, on_bad=on_bad, past_end=past_end)


class TorchGraph:
    """A function in torch with the inputs of an exported one, which reads and writes the arrays of the caller.

    Args:
        name: the file, for messages.
        metadata: what the file says of itself.
        function: the function.
        example: its inputs by name, for more than one environment.
    """

    def __init__(
        self, name: str, metadata: str | None, function: Callable[..., Any], example: Mapping[str, Any]
    ) -> None:
        self.name, self.metadata = name, metadata
        self._function = function
        stated = read_stated(name, metadata)
        self._of_layers = [name for name, shape in stated.inputs.items() if shape and shape[0] != "E"]
        values = {name: value for name, value in example.items() if name != MEMORY}
        values |= zip(self._of_layers, example.get(MEMORY, ()), strict=True)
        self.inputs = {name: _shape(value) for name, value in values.items()}
        self.outputs = {name: _shape(value) for name, value in zip(stated.outputs, self._call(values), strict=True)}

    def bind(self, inputs: Arrays, outputs: Arrays) -> None:
        self._inputs = {name: torch.from_numpy(inputs[name]) for name in self.inputs}
        self._results = [torch.from_numpy(outputs[name]) for name in self.outputs]

    def run(self) -> None:
        for result, value in zip(self._results, self._call(self._inputs), strict=True):
            result.copy_(value)

    @torch.inference_mode()
    def _call(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """Inputs by name -> outputs in order."""
        arguments: dict[str, Any] = {name: value for name, value in values.items() if name not in self._of_layers}
        if self._of_layers:
            arguments[MEMORY] = [values[name] for name in self._of_layers]
        *results, last = self._function(**arguments)
        return [*results, *(last if self._of_layers else [last])]


def _shape(value: Tensor) -> Shape:
    """The shape of an input or output. The first axis is that of environments or rows."""
    return ("rows", *value.shape[1:]) if value.dim() else ()
