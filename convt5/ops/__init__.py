"""Functions of sequence models: convolutions, attention, masks, losses; arrays in, arrays out.

Convolutions, attention and losses define their reverse-mode gradients by hand (`jax.custom_vjp`).
`jax.grad` and `jax.vjp` work, and so does forward mode over them, as in Hessian-vector products.
Forward mode of the functions themselves (`jax.jvp`, `jax.jacfwd`) raises an error.

All functions work inside `jax.shard_map` with its default `check_vma=True`: each device computes
its own shard, and the gradient of a replicated argument is summed over the devices.
"""

from convt5.ops.attention.operators import attend
from convt5.ops.convolution.operators import depthwise_conv, dynamic_conv, lightweight_conv
from convt5.ops.convolution.whole_rows import long_conv
from convt5.ops.cross_entropy.operators import linear_cross_entropy, token_cross_entropy
from convt5.ops.geometry import Padding, pad_widths
from convt5.ops.masking import attention_mask, shift_right

__all__ = [
    "Padding",
    "attend",
    "attention_mask",
    "depthwise_conv",
    "dynamic_conv",
    "lightweight_conv",
    "linear_cross_entropy",
    "long_conv",
    "pad_widths",
    "shift_right",
    "token_cross_entropy",
]
