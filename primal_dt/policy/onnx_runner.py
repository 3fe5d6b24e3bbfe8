"""Run an exported policy with numpy and onnxruntime alone; torch is not needed.

from primal_dt.policy.onnx_runner import OnnxPolicy

policy = OnnxPolicy("policy.onnx")
policy.reset(3600.0)
action = policy.act(observation)
policy.observe(reward)
"""

from pathlib import Path
from typing import Any

from primal_dt.policy.exported import Arrays, ExportedPolicy
from primal_dt.policy.exported_file import KEY, Shape
from primal_dt.policy.stepwise import OnBad, PastEnd

__all__ = ["OnnxPolicy"]


class OnnxPolicy(ExportedPolicy):
    """An ONNX file as a policy; :class:`~primal_dt.policy.stepwise.StepwisePolicy` describes its calls.

    Args:
        path: the file that ``export.py`` has written.
        threads: number of CPU threads. One is fastest for a few environments.
        on_bad: ``error`` or ``hold``, see :class:`~primal_dt.policy.stepwise.StepwisePolicy`.
        past_end: ``clamp`` or ``error``, see there.

    Raises:
        ValueError: if the file is not an exported policy of this version.
        ImportError: if onnxruntime is not installed.
    """

    def __init__(
        self, path: str | Path, *, threads: int = 1, on_bad: OnBad = "error", past_end: PastEnd = "clamp"
    ) -> None:
        super().__init__(_OnnxGraph(path, threads), on_bad=on_bad, past_end=past_end)


class _OnnxGraph:
    """An ONNX file in onnxruntime, which reads and writes the arrays of the caller without copies."""

    def __init__(self, path: str | Path, threads: int) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                "to run an exported policy, install onnxruntime, or the extra export of this package: "
                "pip install -c constraints.txt -e '.[export]'"
            ) from error
        if threads < 1:
            raise ValueError(f"threads ({threads}) must be at least 1")
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no exported policy {path}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own exceptions for foreign files
            raise ValueError(f"{path} is not an ONNX file: {str(error).splitlines()[0]}") from error
        self.name = str(path)
        self.metadata: str | None = self._session.get_modelmeta().custom_metadata_map.get(KEY)
        self.inputs: dict[str, Shape] = {entry.name: tuple(entry.shape) for entry in self._session.get_inputs()}
        self.outputs: dict[str, Shape] = {entry.name: tuple(entry.shape) for entry in self._session.get_outputs()}
        self._binding: Any = None

    def bind(self, inputs: Arrays, outputs: Arrays) -> None:
        self._arrays = inputs, outputs  # which must exist as long as the binding
        self._binding = self._session.io_binding()
        for name in self.inputs:
            values = inputs[name]
            self._binding.bind_input(name, "cpu", 0, values.dtype, values.shape, values.ctypes.data)
        for name in self.outputs:
            values = outputs[name]
            self._binding.bind_output(name, "cpu", 0, values.dtype, values.shape, values.ctypes.data)

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)
