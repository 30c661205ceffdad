"""What takes self-attention's place: the registry of mixing kinds, one line and one file each."""

from convt5.modeling.mixers.attention import SelfAttentionConfig
from convt5.modeling.mixers.base import MixerConfig
from convt5.modeling.mixers.depthwise import Depthwise
from convt5.modeling.mixers.dynamic import Dynamic
from convt5.modeling.mixers.lightweight import Lightweight

KINDS: dict[str, type[MixerConfig]] = {
    kind.kind: kind for kind in (Depthwise, Lightweight, Dynamic, SelfAttentionConfig)
}
"""The description of every kind, by the name that `StackConfig.mixing` gives it."""
