"""Tables of what the TPU compiler makes: what is refused, and which bytes are those of HBM."""

import pytest
import tpu_canon_costs as canon_costs
import tpu_operator_costs as operator_costs

from convt5.analysis import topology
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


HLO = """HloModule m

%fused (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %a = bf16[8,128]{1,0:T(8,128)(2,1)} add(%p, %p)
}

ENTRY %main (x.1: bf16[8,128], w.1: f32[256,128], s.1: f32[128]) -> bf16[8,128] {
  %x.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0), frontend_attributes={a="b"}
  %w.1 = f32[256,128]{1,0:T(8,128)} parameter(1)
  %s.1 = f32[128]{0:T(128)} parameter(2)
  %copy-start = (f32[128]{0:T(128)S(1)}, f32[128]{0:T(128)}, u32[]{:S(2)}) copy-start(%s.1)
  %slice-start = ((f32[256,128]{1,0}), f32[64,128]{1,0:T(8,128)S(1)}, s32[]) slice-start(%w.1)
  %copy-done = f32[128]{0:T(128)S(1)} copy-done(%copy-start)
  %slice-done = f32[64,128]{1,0:T(8,128)S(1)} slice-done(%slice-start)
  %fusion = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%x.1, %copy-done, %slice-done), calls=%fused
  %call = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%fusion), custom_call_target="tpu_custom_call"
  ROOT %end = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%call, %fusion), kind=kLoop, calls=%fused
}
"""


def test_bytes_of_hbm_are_those_that_no_layout_puts_on_the_chip():
    rows, scale, part = 2 * 8 * 128, 4 * 128, 4 * 64 * 128
    # x, the scale and a part of w are read; the call writes, and the end reads that and writes.
    assert canon_costs.hbm_bytes(HLO) == rows + scale + part + rows + 2 * rows


def test_the_least_of_a_canon_layer_is_its_input_and_output_once():
    assert canon_costs.least_bytes("A", batch=8, both=False) == 2 * 2 * 8 * 512 * 768
    assert canon_costs.least_bytes("BD", batch=1, both=True) == 4 * 2 * 512 * 7 * 768


@pytest.mark.tpu
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("places", "both", "batch", "most"),
    [("ABCD", False, 8, 1.3), ("ABCD", True, 4, 2), ("C", False, 64, 1.3)],
)
def test_canon_layers_add_little_more_than_the_least_to_a_layer(
    compiler, places, both, batch, most
):
    """64 rows have more hidden values than the chip holds: both products must remain one."""
    device = topology.load("v5e:2x2").devices[0]
    without, found = (
        canon_costs.hbm_bytes(
            canon_costs.compile_layer(p, batch=batch, both=both, device=device).as_text() or ""
        )
        for p in ("", places)
    )
    assert found - without < most * canon_costs.least_bytes(places, batch=batch, both=both)
