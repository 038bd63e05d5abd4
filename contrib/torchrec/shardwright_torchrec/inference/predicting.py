"""Modules that predict, and factories that package them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["BatchingMetadata", "PredictFactory", "PredictModule", "QualNameMetadata", "quantize_feature"]


@dataclass
class BatchingMetadata:
    """Form of an input for a server that joins requests: `"dense"`, `"sparse"`, ..., its device, pinned tensors."""

    type: str
    device: str
    pinned: list[str] = field(default_factory=list)


@dataclass
class QualNameMetadata:
    """Properties of an output by its name."""

    need_preproc: bool


class PredictFactory(ABC):
    """Makes a module that predicts, and tells a server how to call it."""

    @abstractmethod
    def create_predict_module(self) -> torch.nn.Module:
        """The module."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Form of each input."""

    @abstractmethod
    def result_metadata(self) -> str:
        """Name of the form of results."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: torch.nn.Module) -> torch.nn.Module:
        """The module after changes that need no weights."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: torch.nn.Module) -> torch.nn.Module:
        """The module after changes that need weights."""

    @abstractmethod
    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Properties of outputs."""

    def model_inputs_data(self) -> dict[str, Any]:
        """Further data of inputs: none."""
        return {}


class PredictModule(torch.nn.Module, ABC):
    """A model with a function of a request.

    Args:
        module: the model.
        device: device of predictions, on which requests are run.
    """

    def __init__(self, module: torch.nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module, self._device = module, torch.device(device or "cpu")

    @property
    def predict_module(self) -> torch.nn.Module:
        """The model."""
        return self._module

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """The prediction of a request."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """The prediction of a request, without gradients, on the device."""
        with torch.inference_mode(), self._device:
            return self.predict_forward(batch)

    def state_dict(
        self, destination: Mapping[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """State dict of the model, without this wrapper's name."""
        return self._module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)


def quantize_feature(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs with floats in float16; a hook before the forward pass of a module in float16."""
    wide = (torch.float32, torch.float64)
    return tuple(
        value.half() if isinstance(value, Tensor) and value.dtype in wide else value for value in inputs
    )
