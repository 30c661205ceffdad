"""The settings of a model that its attention and mixers depend on."""

from typing import Any, Protocol, runtime_checkable

Size = Any
"""An int, or a symbolic size: exported programs have a symbolic batch, whose type is private."""


@runtime_checkable
class ModelSizes(Protocol):
    """The settings of a text model that its attention and mixers depend on."""

    @property
    def emb_dim(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...
    @property
    def mlp(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dropout_rate(self) -> float: ...
    @property
    def dtype(self) -> str: ...
    @property
    def taps_cross_segments(self) -> bool: ...
