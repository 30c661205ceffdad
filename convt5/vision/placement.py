"""Sharding rules of the parameters of a Vision Transformer."""

from convt5.modeling import canon
from convt5.modeling.sharding import Rule

# As in text models, "tensor" splits attention heads and the channels of feed-forward layers, and
# "fsdp" the other axis. The 3x3 convolutions of a stem are small and are replicated.
_RULES = (
    Rule(r"stem/(patchify|output)/kernel$", (None, None, None, "fsdp")),
    Rule(r"stem/(patchify|output)/bias$"),
    Rule(r"stem/layers/\d+/convolution/kernel$", optional=True),
    Rule(r"norm/(scale|bias|mean|variance)$"),
    Rule(r"class_token$", optional=True),
    Rule(r"position_embedding$", (None, "fsdp")),
    *canon.sharding_rules,
    Rule(r"attention/input/kernel$", ("fsdp", None, "tensor")),
    Rule(r"attention/input/bias$", (None, "tensor")),
    Rule(r"attention/output/kernel$", ("tensor", "fsdp")),
    Rule(r"mlp/wi/kernel$", ("fsdp", "tensor")),
    Rule(r"mlp/wi/bias$", ("tensor",)),
    Rule(r"mlp/wo/kernel$", ("tensor", "fsdp")),
    Rule(r"(attention/output|mlp/wo)/bias$"),
    Rule(r"head/kernel$", ("fsdp",)),
    Rule(r"head/bias$"),
)


def rules() -> tuple[Rule, ...]:
    """Returns the rules; gin files bind `trainer.train.sharding_rules` to a call of this."""
    return _RULES
