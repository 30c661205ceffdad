"""All proofs of a model, as `inspect --prove` shows them.

Each changes inputs that outputs must not depend on, runs one compiled program on both, and compares
number for number. What two programs compute, such as decoding and teacher forcing, is compared up
to rounding. All is computed in float64 on the CPU, where dependence shows that float32 would round
away.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from convt5.analysis.proofs import meshes as mesh_proofs
from convt5.analysis.proofs import vision
from convt5.analysis.proofs.results import Proof, in_float64, random_model, table
from convt5.analysis.proofs.text import TextProofs
from convt5.interchange import loading
from convt5.modeling.model import ConvT5
from convt5.modeling.sharding import MeshConfig
from convt5.training.train_step import StepConfig
from convt5.vision.model import ViT

SEED = 0

LONG_FLOPS = 1e12
"""Operations in float64 that take a core of a CPU about a minute."""


@dataclasses.dataclass(frozen=True)
class ProofReport:
    """The proofs of one model.

    Attributes:
        title: the model, its parameters and the rows that were used.
        proofs: one for each property.
    """

    title: str
    proofs: Sequence[Proof]

    @property
    def exit_code(self) -> int:
        """0 where no property fails, otherwise 1."""
        return int(any(proof.result == "fails" for proof in self.proofs))

    def as_text(self) -> str:
        """Returns a table below a title."""
        return f"{self.title}\n{table(self.proofs)}"

    def as_json(self) -> list[dict[str, Any]]:
        """Returns plain values."""
        return [proof.as_json() for proof in self.proofs]


def make_report(
    name: str,
    step: StepConfig,
    *,
    lengths: Sequence[int] = (),
    checkpoint: str | None = None,
    meshes: Sequence[MeshConfig] = (),
) -> ProofReport:
    """Proves every property of a model, with the parameters of a checkpoint or with random ones.

    Args:
        name: of the model.
        step: the model, and the update that is proven on meshes.
        lengths: tokens of an encoder's and of a decoder's row, for a text model.
        checkpoint: a run directory, or another folder that `load_model` takes; its model is
            proven, whatever `step` says.
        meshes: on which the update must be that of one device.

    Raises:
        UserError: a checkpoint that cannot be loaded, rows too short to hold several examples, or a
            mesh that does not divide the model.
    """
    if checkpoint is None:
        model, parameters = random_model(step.model, seed=SEED), "random parameters"
    else:
        model, parameters = loading.load_model(checkpoint), f"the parameters of {checkpoint}"
    proofs = prove(model, *lengths)
    if meshes:
        proofs += mesh_proofs.prove(step, model, meshes, lengths=lengths)
    rows = "rows of {} + {} tokens".format(*lengths) if lengths else "images"
    return ProofReport(f"Proofs of {name}, with {parameters}, on random {rows}", proofs)


def prove(model: ConvT5 | ViT, encoder_length: int = 64, decoder_length: int = 64) -> list[Proof]:
    """Returns the proof of every property that does not need a mesh.

    Args:
        model: its parameters are used as they are.
        encoder_length, decoder_length: tokens of a row; unused for a vision model.

    Raises:
        UserError: rows too short to hold several examples.
    """
    random = np.random.default_rng(SEED)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = in_float64(model)
        if isinstance(exact, ViT):
            return [vision.neighbours(exact, random)]
        proofs = TextProofs(exact, encoder_length, decoder_length, random)
        if proofs.flops > LONG_FLOPS:
            print(
                f"the proofs take about {proofs.flops / 1e12:.0f} TFLOP in float64, a minute of a "
                f"core each; shorter rows than {encoder_length} + {decoder_length} tokens take "
                "less (--encoder_length, --decoder_length), and show as much where they are longer "
                "than the receptive fields.",
                file=sys.stderr,
            )
        return proofs.all()
