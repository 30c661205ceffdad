"""Writes docs/parity.md: the largest differences between convt5 and what others recorded.

    python tests/parity.py ../shared/golden > docs/parity.md

The tests hold every difference below its tolerance; this prints the differences themselves.
"""

import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import conftest  # noqa: F401  Settings that must hold before jax is imported.
import jax
import numpy as np
import test_fairseq_block as fairseq
import test_hugging_face as hf
import test_mesh_tf as mesh
import test_optimizer_parity as optimizer

from convt5.interchange import mesh_tf
from convt5.interchange.mapping import take_apart
from convt5.tree_paths import named_leaves

HEADER = """\
# Parity

What convt5 computes, compared with numbers recorded from the original implementations. Written by
`python tests/parity.py ../shared/golden > docs/parity.md` on a CPU; Mesh TensorFlow and Hugging
Face in float32, fairseq in float64. Differences are absolute, those of gradient norms relative;
logits are compared at real positions. `tests/test_mesh_tf.py`, `test_optimizer_parity.py`,
`test_hugging_face.py` and `test_fairseq_block.py` hold the tolerances.

| source | quantity | largest difference | tolerance |
|---|---|---|---|
"""


class Row(NamedTuple):
    """One line of the table; a difference of None means identical ids."""

    source: str
    quantity: str
    difference: float | None
    tolerance: float | None

    def text(self) -> str:
        if self.difference is None:
            return f"| {self.source} | {self.quantity} | identical | identical |"
        return f"| {self.source} | {self.quantity} | {self.difference:.1e} | {self.tolerance:.0e} |"


def mesh_rows(folder: pathlib.Path) -> Iterator[Row]:
    ref, ours, original = mesh.reference(folder), mesh.computed(folder), mesh.imported(folder)
    source = f"Mesh TensorFlow, {folder.name}"

    def row(quantity, a, b, where=...):
        return Row(source, quantity, mesh.largest(a, b, where), mesh.TOLERANCE)

    yield row("encoder output", ours["encoded"], ref["encoder_output"])
    yield row("logits", ours["logits"], ref["logits"], ref["targets"] > 0)
    yield row("loss, evaluation", ours["loss_eval"], ref["loss_eval"])
    yield row("loss, training", ours["loss_train"], ref["loss_train"])
    gradients = take_apart(original.sources, dict(named_leaves(ours["gradients"])))
    norms = {name: ref[f"grad_l2/{name}"] for name in gradients}
    relative = [abs(np.linalg.norm(g) / norms[name] - 1) for name, g in gradients.items()]
    yield Row(source, "gradient norms, each variable", max(relative), mesh.TOLERANCE)
    crossing = mesh.changed(original, taps_cross_segments=True)
    packed = mesh.compute_packed(crossing, mesh.plain_batch(ref, "packed_"))
    real = ref["packed_targets_segmentation"] > 0
    yield row("packed logits, taps crossing", packed["logits"], ref["packed_logits"], real)
    yield row("packed loss, taps crossing", packed["loss_eval"], ref["packed_loss_eval"])
    length = ref["greedy_ids"].shape[1]
    ids = mesh.greedy(original.model(), ref["inputs"], length, hide_start_token=False)
    yield same_ids(source, "greedy ids, with the original's defect", ids, ref["greedy_ids"])


def optimizer_rows(folder: pathlib.Path) -> Iterator[Row]:
    source = f"Mesh TensorFlow, {folder.name}"
    _, imported, settings = optimizer.read(folder, 0)
    recorded = np.load(folder / "train.npz")
    yield from trajectory(source, "A", imported, settings, recorded)
    checkpoint, imported, settings = optimizer.read(folder, 10)
    moments = mesh_tf.read_moments(checkpoint, imported)
    batches = optimizer.batches(recorded, [10, 11])
    _, metrics = optimizer.train(imported, settings, batches, moments)
    difference = mesh.largest(metrics["loss"], recorded["resume_loss"])
    yield Row(source, "losses of 2 resumed steps", difference, optimizer.TOLERANCE)
    if folder.name in optimizer.FACTORED:
        _, imported, settings = optimizer.read(folder, 0)
        imported, settings = optimizer.factored(imported, settings)
        recorded = np.load(folder / "train_factored.npz")
        yield from trajectory(source, "B (factored)", imported, settings, recorded)


def trajectory(source, name, imported, settings, recorded) -> Iterator[Row]:
    batches = optimizer.batches(recorded, range(10))
    state, metrics = optimizer.train(imported, settings, batches)
    loss = mesh.largest(metrics["loss"], recorded["loss"])
    yield Row(source, f"losses of 10 steps, {name}", loss, optimizer.TOLERANCE)
    final = optimizer.final_variables(state, imported)
    variables = max(mesh.largest(v, recorded[f"final/{n}"]) for n, v in final.items())
    yield Row(source, f"variables after 10 steps, {name}", variables, optimizer.TOLERANCE)


def hugging_face_rows(folder: pathlib.Path) -> Iterator[Row]:
    ref, model = hf.reference(folder), hf.imported(folder).model()
    source = f"Hugging Face T5, {folder.name}"

    def row(quantity, a, b, where=...):
        return Row(source, quantity, hf.largest(a, b, where), hf.TOLERANCE)

    encoded = model.encode(ref["input_ids"])
    real = ref["attention_mask"] > 0
    yield row("encoder output", encoded, ref["encoder_last_hidden_state"], real)
    logits = model(ref["input_ids"], ref["decoder_input_ids"])
    yield row("logits", logits, ref["logits"], ref["labels"] != -100)
    long = model(ref["long_input_ids"], ref["long_decoder_input_ids"])
    yield row("logits, distances beyond 128", long, ref["long_logits"])
    length = ref["greedy_ids"].shape[1] - 1
    greedy = hf.decode(model, ref["input_ids"], max_length=length, strategy=hf.Greedy())
    yield same_ids(source, "greedy ids", greedy.tokens[:, 0], ref["greedy_ids"][:, 1:])
    beams = hf.decode(model, ref["input_ids"], max_length=length, strategy=hf.BeamSearch())
    width = ref["beam4_ids"].shape[-1] - 1
    yield same_ids(source, "beam-4 ids", beams.tokens[:, :, :width], ref["beam4_ids"][:, :, 1:])
    yield row("beam-4 scores", beams.scores, ref["beam4_scores"])


def fairseq_rows(golden: pathlib.Path) -> Iterator[Row]:
    for name in fairseq.CASES:
        case, arrays = fairseq.recorded(golden, name)
        block = fairseq.Block(case)
        values = fairseq.ours(case, fairseq.group(arrays, "param."))
        real = ~arrays["pad_mask"] if case["mask"] else np.ones((case["B"], case["T"]), bool)
        y = jax.jit(block)(
            fairseq.filled(block.parts, values),
            fairseq.batch_first(arrays["x"]),
            jax.numpy.asarray(real, jax.numpy.int32),
        )
        difference = mesh.largest(y, np.asarray(fairseq.batch_first(arrays["y"])), real)
        yield Row(f"fairseq, block {name}", "output", difference, fairseq.TOLERANCE)


def same_ids(source: str, quantity: str, ours, theirs) -> Row:
    different = int((np.asarray(ours) != theirs).sum())
    return Row(source, quantity, float(different) if different else None, 0.0)


def show(rows: Callable[[pathlib.Path], Iterator[Row]], folder: pathlib.Path) -> None:
    for row in rows(folder):
        print(row.text(), flush=True)


def main(golden: pathlib.Path) -> None:
    print(HEADER, end="")
    for family in mesh.FAMILIES:
        show(mesh_rows, golden / "mesh_tf" / family)
        show(optimizer_rows, golden / "mesh_tf" / family)
    for version in hf.VERSIONS:
        show(hugging_face_rows, golden / "hf_t5" / version)
    with jax.enable_x64(True):
        show(fairseq_rows, golden)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
