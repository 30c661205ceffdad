"""Depthwise, lightweight and dynamic convolution: the operators, and a file for each platform."""
