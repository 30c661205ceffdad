"""convt5: pretrain, fine-tune, evaluate and study encoder-decoders built from convolutions.

Importing the package loads nothing else. The model, operators, training step and decoding import
only JAX; data, tasks and evaluation need TensorFlow and seqio.
"""

import importlib

__version__ = "0.1.0"

_LAZY = {
    "ConvT5": "convt5.modeling.model",
    "ConvT5Config": "convt5.architecture",
    "Predictor": "convt5.evaluation.predictor",
    "StackConfig": "convt5.architecture",
    "UserError": "convt5.errors",
    "ViT": "convt5.vision.model",
    "ViTConfig": "convt5.vision.architecture",
    "load_model": "convt5.loading",
    "load_predictor": "convt5.evaluation.predictor",
    "load_vocabulary": "convt5.evaluation.run_settings",
}

__all__ = [*sorted(_LAZY), "__version__"]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
