"""Cross-entropy of tokens: the operators, and the formulations of the fused loss."""
