"""convt5: pretrain, fine-tune, evaluate and study encoder-decoders built from convolutions.

Importing the package loads nothing else. The model, operators, training step and decoding import
only JAX; data, tasks and evaluation need TensorFlow and seqio.
"""

import importlib
import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and sys.path:
    # `python -m convt5.NAME` is being looked up, and Python looks for modules in the working
    # directory before all others: a `json.py` there, which may have come with a model, would be
    # run. The user's own modules are found there all the same.
    sys.path.append(sys.path.pop(0))

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
