"""Many runs of the trainer that differ in chosen settings, and what their results say together."""

from convt5.sweeps.equal_cost import Pairing
from convt5.sweeps.paper import Claim, CostClaim, Paper, Question
from convt5.sweeps.study import Grid, Study

__all__ = ["Claim", "CostClaim", "Grid", "Pairing", "Paper", "Question", "Study"]
