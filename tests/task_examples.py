"""Reads the examples of a seqio task, without AutoGraph, which takes half of the time."""

import tensorflow as tf


def examples(task, split="train", lengths=None, *, num=-1, **settings):
    """Returns examples of a split as NumPy values, in the order of the source."""
    settings = {"shuffle": False, "try_in_mem_cache": False, **settings}
    read = tf.autograph.experimental.do_not_convert(task.get_dataset)
    return list(read(lengths, split, **settings).take(num).as_numpy_iterator())
