"""What takes self-attention's place: the registry of mixing kinds, one line and one file each."""

from convt5.modeling.mixers.attention import SelfAttentionConfig as SelfAttentionConfig
from convt5.modeling.mixers.base import MixerConfig, kinds_among
from convt5.modeling.mixers.depthwise import Depthwise as Depthwise
from convt5.modeling.mixers.dynamic import Dynamic as Dynamic
from convt5.modeling.mixers.lightweight import Lightweight as Lightweight
from convt5.modeling.mixers.long import Long as Long

KINDS: dict[str, type[MixerConfig]] = kinds_among(vars())
"""Every description imported above, by the name that `StackConfig.mixing` gives it."""
