"""Depthwise, lightweight and dynamic convolution: the operators, and one file per platform."""
