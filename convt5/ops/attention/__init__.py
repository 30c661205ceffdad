"""Attention over packed rows: the operator, and its formulations."""
