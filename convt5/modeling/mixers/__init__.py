"""The registry of mixing kinds, which replace self-attention: one line and one file each."""

from convt5.modeling.mixers.attention import SelfAttentionConfig as SelfAttentionConfig
from convt5.modeling.mixers.base import MixerConfig, kinds_among
from convt5.modeling.mixers.depthwise import Depthwise as Depthwise
from convt5.modeling.mixers.dynamic import Dynamic as Dynamic
from convt5.modeling.mixers.lightweight import Lightweight as Lightweight
from convt5.modeling.mixers.long import Long as Long

KINDS: dict[str, type[MixerConfig]] = kinds_among(vars())
"""All mixing kinds, by the name used in `StackConfig.mixing`."""
