"""All proofs of a model, as shown by `inspect --prove`.

A proof changes inputs on which outputs must not depend, runs one compiled program on both, and
compares exactly. Results of two different programs, such as decoding and teacher forcing, are
compared up to rounding. Everything is computed in float64 on the CPU, which reveals dependence that
float32 would round away.
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
from convt5.modeling.model import ConvT5
from convt5.modeling.sharding import MeshConfig
from convt5.training.train_step import StepConfig
from convt5.vision.model import ViT

SEED = 0

LONG_FLOPS = 1e12
"""Float64 operations that take a CPU core about a minute."""


@dataclasses.dataclass(frozen=True)
class ProofReport:
    """The proofs of one model.

    Attributes:
        title: the model, its number of parameters, and the rows used.
        proofs: one proof for each property.
    """

    title: str
    proofs: Sequence[Proof]

    @property
    def exit_code(self) -> int:
        """0 if no property fails, otherwise 1."""
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
    trained: ConvT5 | ViT | None = None,
    meshes: Sequence[MeshConfig] = (),
) -> ProofReport:
    """Proves every property of a model, with its trained parameters or random ones.

    Args:
        name: name of the model.
        step: the model, and the update that is proven on meshes.
        lengths: tokens per encoder row and per decoder row, for a text model.
        trained: a trained model, which replaces that of `step`; None means random parameters.
        meshes: meshes on which the update must equal that on one device.

    Raises:
        UserError: rows are too short for several examples, or a mesh does not divide the model.
    """
    model = random_model(step.model, seed=SEED) if trained is None else trained
    parameters = "random parameters" if trained is None else "trained parameters"
    proofs = prove(model, *lengths)
    if meshes:
        proofs += mesh_proofs.prove(step, model, meshes, lengths=lengths)
    rows = "rows of {} + {} tokens".format(*lengths) if lengths else "images"
    return ProofReport(f"Proofs of {name}, with {parameters}, on random {rows}", proofs)


def prove(model: ConvT5 | ViT, encoder_length: int = 64, decoder_length: int = 64) -> list[Proof]:
    """Proves every property that does not need a mesh.

    Args:
        model: the model, with its parameters as they are.
        encoder_length, decoder_length: tokens per row; unused for a vision model.

    Raises:
        UserError: as for `TextProofs`.
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
