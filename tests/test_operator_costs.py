"""The table of operators refuses what no convolution has before anything is compiled."""

import pytest

from convt5.errors import UserError
from convt5.tpu import operator_costs


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--taps", "3", "0"], "--taps=0 must be at least 1"),
        (["--dilations", "-1"], "--dilations=-1 must be at least 1"),
        (["--topology=v9"], "topology='v9' is not known"),
    ],
)
def test_wrong_flags_are_told(flags, message):
    with pytest.raises(UserError, match=message):
        operator_costs.main(flags)
