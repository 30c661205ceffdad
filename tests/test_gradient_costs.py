"""Gradients of base models are compiled once, told beside T5X's, and drawn under the roofs."""

import gradient_costs
import pytest
from gradient_costs import PEER, Program

from convt5.errors import UserError


def report(scale: float):
    return {
        "flops": 4e12,
        "bytes_accessed": 40e9 * scale,
        "temporaries": 2e9 * scale,
        "compute_seconds": 0.01,
        "memory_seconds": 0.016 * scale,
        "compile_cpu_seconds": 60.0,
    }


@pytest.mark.slow
def test_what_was_compiled_is_told_beside_t5x_and_drawn(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    compiled = []

    def compile_(self, checkout):
        compiled.append(self)
        return report(1.0 if self.model == PEER else 0.5)

    monkeypatch.setattr(Program, "compiled", compile_)
    page = tmp_path / "page.md"
    page.write_text("Above\n<!-- gradients -->\nold\n<!-- end -->\nbelow\n")
    output = f"--output={tmp_path}"
    made = ["--t5x=checkout", "--models", "dynamic_base", "--lengths", "512", "2048"]
    gradient_costs.main([output, *made])
    gradient_costs.main([output, "--report_only", f"--page={page}"])
    assert compiled == [
        Program(model, "v5p:1x1x1", length)
        for model in (PEER, "dynamic_base")
        for length in (512, 2048)
    ]
    text = capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [PEER, "512", "4.00", "40", "2", "16.0 ms (memory)", "60 s"] in rows
    ours = ["`dynamic_base`", "2,048", "4.00", "20 (0.500)", "1 (0.500)", "10.0 ms (compute)"]
    assert [*ours, "60 s"] in rows
    assert "`dynamic_base`" in page.read_text()
    assert "old" not in page.read_text()
    assert (tmp_path / "roofline_tpu.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "513"], r"--lengths=513 must divide 4,096"),
        (["--lengths", "2"], r"--lengths=2 must divide 4,096 encoder tokens, and be at least 4"),
        (["--report_only"], "nothing is kept for v5p:1x1x1"),
        (["--report_only", "--lengths", "512"], "--lengths is for what is compiled"),
        (["--models", "T5X"], r"--models=T5X is no file of gin/models; give --t5x=CHECKOUT"),
        (["--topology=v5e:2x2"], "v5e:2x2 has several devices; give one chip"),
        (["--topology=v3:1x1"], "v3:1x1 has several devices"),
        (["--topology=v9", "--report_only"], "topology='v9' is not known"),
        (["--page=nowhere.md"], "--page=nowhere.md cannot be read and written"),
    ],
)
def test_what_cannot_be_told_is_refused(flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(Program, "compiled", lambda *_: pytest.fail("minutes were spent"))
    output = tmp_path / "output"
    with pytest.raises(UserError, match=message):
        gradient_costs.main([f"--output={output}", *flags])
    assert not output.exists()


@pytest.mark.tpu
def test_a_model_is_compiled_for_one_chip(libtpu, monkeypatch):
    monkeypatch.setattr(gradient_costs, "TOKENS", 256)
    found = Program("dynamic_tiny", "v5e:1x1", 128).compiled(None)
    assert found["flops"] > 2 * 256 * 1e6
    assert found["memory_seconds"] == found["bytes_accessed"] / 819e9
