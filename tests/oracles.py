"""The operators as slow, obvious NumPy loops, written from the equations alone.

Nothing here is shared with the code under test: offsets, masks and softmax are spelled out again.
"""

import math

import numpy as np


def tap_offsets(kernel_size: int, dilation: int, padding) -> list[int]:
    """Offsets of the inputs that an output reads, first tap first."""
    if padding == "CENTERED":
        # i + d * (j - ceil((K + 1) / 2)), j = 1..K: arXiv 2105.03322.
        middle = math.ceil((kernel_size + 1) / 2)
        return [dilation * (j - middle) for j in range(1, kernel_size + 1)]
    if padding == "CAUSAL":
        return [-dilation * (kernel_size - j) for j in range(1, kernel_size + 1)]
    left, _ = padding
    return [dilation * j - left for j in range(kernel_size)]


def softmax(logits: np.ndarray, axis: int) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return shifted / shifted.sum(axis=axis, keepdims=True)


def convolve(x, weights, *, dilation=1, padding="CENTERED", segment_ids=None, crosses=False):
    """O[b, i, c] = sum_j weights[b, i, j, c] x[b, i + offset j, c], all c at once, in float64."""
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    batch, length, _ = x.shape
    offsets = tap_offsets(weights.shape[2], dilation, padding)
    out = np.zeros_like(x)
    for b in range(batch):
        for i in range(length):
            for j, offset in enumerate(offsets):
                source = i + offset
                if not 0 <= source < length:
                    continue
                if segment_ids is not None:
                    mine, theirs = segment_ids[b][i], segment_ids[b][source]
                    if mine == 0 or theirs == 0 or (mine != theirs and not crosses):
                        continue
                out[b, i] += weights[b, i, j] * x[b, source]
    return out


def convolve_gradients(x, weights, cotangent, **where):
    """Gradients of sum(convolve(x, weights) * cotangent) in x and weights.

    The sum is linear in each, so a gradient is its value on unit arrays: too slow for anything but
    the smallest shapes, and impossible to get wrong.
    """
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)

    def slopes(shape, value):
        found = np.zeros(shape)
        for index in np.ndindex(*shape):
            unit = np.zeros(shape)
            unit[index] = 1.0
            found[index] = np.sum(value(unit) * cotangent)
        return found

    return (
        slopes(x.shape, lambda unit: convolve(unit, weights, **where)),
        slopes(weights.shape, lambda unit: convolve(x, unit, **where)),
    )


def depthwise_weights(kernel, batch: int, length: int) -> np.ndarray:
    """[K, embed] for every position: [batch, length, K, embed]."""
    return np.broadcast_to(kernel, (batch, length, *np.shape(kernel)))


def lightweight_weights(logits, batch: int, length: int, embed: int) -> np.ndarray:
    """Softmax over the taps; channel c uses kernel floor(c * heads / embed)."""
    weights = softmax(np.asarray(logits, np.float64), axis=0)
    heads = weights.shape[1]
    shared = np.stack([weights[:, (c * heads) // embed] for c in range(embed)], axis=1)
    return depthwise_weights(shared, batch, length)


def dynamic_weights(logits, embed: int) -> np.ndarray:
    """As `lightweight_weights`, with logits [batch, length, K, heads]."""
    weights = softmax(np.asarray(logits, np.float64), axis=2)
    heads = weights.shape[3]
    return np.stack([weights[..., (c * heads) // embed] for c in range(embed)], axis=3)


def cross_entropy(logits, targets, *, z_loss=0.0, label_smoothing=0.0):
    """Per token: -sum_v q[v] log p[v] with the smoothed target q, and z_loss log(Z)^2."""
    logits = np.asarray(logits, np.float64)
    vocab = logits.shape[-1]
    nll, z_term = np.zeros(logits.shape[:2]), np.zeros(logits.shape[:2])
    for b, i in np.ndindex(*logits.shape[:2]):
        log_z = math.log(sum(math.exp(value) for value in logits[b, i]))
        for v in range(vocab):
            q = label_smoothing / vocab + (1 - label_smoothing) * (v == targets[b][i])
            nll[b, i] -= q * (logits[b, i, v] - log_z)
        z_term[b, i] = z_loss * log_z**2
    return nll, z_term
