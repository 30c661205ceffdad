"""The table of operators refuses what no convolution has before anything is compiled."""

import pytest
import tpu_operator_costs as operator_costs

from convt5.errors import UserError


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
