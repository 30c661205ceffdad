"""Costs and receptive fields of a model before anything runs, by formula and by compiler."""
