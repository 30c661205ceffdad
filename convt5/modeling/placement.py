"""Sharding rules of the parameters of a text model."""

from convt5.modeling import attention, canon
from convt5.modeling.mixers import KINDS
from convt5.modeling.sharding import Rule

# Channels of a convolution are independent. They stay split over "tensor" from the input projection
# to the output projection, and only the latter communicates. The same holds for attention heads and
# feed-forward layers. "fsdp" splits the other axis, "data" none.
_MIXER_RULES = dict.fromkeys(rule for kind in KINDS.values() for rule in kind.sharding_rules)

TEXT_RULES = (
    Rule(r"token_embedder/embedding$", ("tensor", "fsdp")),
    Rule(r"position_embedder/embedding$", (None, "fsdp"), optional=True),
    Rule(r"relative_bias/embedding$", (None, "tensor"), optional=True),
    Rule(r"norm/(scale|bias)$"),
    Rule(r"stem/layers/\d+/kernel$", (None, "fsdp", "tensor"), optional=True),
    Rule(r"stem/output/kernel$", ("tensor", "fsdp"), optional=True),
    *canon.sharding_rules,
    *_MIXER_RULES,
    *attention.sharding_rules("cross_attention"),
    Rule(r"mlp/wi(_[01])?/kernel$", ("fsdp", "tensor")),
    Rule(r"mlp/wi(_[01])?/bias$", ("tensor",), optional=True),
    Rule(r"mlp/wo/kernel$", ("tensor", "fsdp")),
    Rule(r"mlp/wo/bias$", optional=True),
    Rule(r"output_head/kernel$", ("fsdp", "tensor"), optional=True),
)
"""The rules of the text models, including those of each mixing kind."""
