"""Writes docs/parity.md: the largest differences between convt5 and what others recorded.

    python tests/parity.py ../shared/golden > docs/parity.md

The tests hold every difference below its tolerance; this prints the differences themselves.
"""

import pathlib
import sys
from collections.abc import Callable, Iterator

import conftest  # noqa: F401  Settings that must hold before jax is imported.
import jax
import numpy as np
import pytest
import test_convolution as convolution
import test_fairseq_block as fairseq
import test_hugging_face as hf
import test_mesh_tf as mesh
import test_optimizer_parity as optimizer
from safetensors.numpy import load_file

from convt5.interchange import mesh_tf
from convt5.interchange.mapping import take_apart
from convt5.modeling.tree_paths import named_leaves

INTRODUCTION = """\
# Parity

This page compares results of convt5 with those recorded from other code. It is written by

    python tests/parity.py ../shared/golden > docs/parity.md

on a CPU. Each number is the largest absolute difference over all elements; padded positions are
left out where their values are undefined. *equal* means identical token ids. Below 1e-5 the last
digit depends on the CPU. The tests named under each heading check that every difference is below
its tolerance.
"""

MESH = """
## Mesh TensorFlow

Mesh TensorFlow 0.1.21 is the original code of the released checkpoints; both sides compute in
float32 (`tests/test_mesh_tf.py`). Columns: lightweight, dynamic and depthwise-separable
convolutions; T5 with absolute positions; T5 1.0. Models are read from checkpoints of the original.
Two settings reproduce behaviour of the original that convt5 does not have by default:
`taps_cross_segments=True` for packed rows, and `hide_start_token=False` for decoding. Beam search
is `decoding.MeshTFBeamSearch`. `tests/test_mesh_tf_architecture.py` covers other sizes, filters and
layer counts, without recordings, by a NumPy model written from the original's description.
"""

TRAINING = """
## Mesh TensorFlow, training

Training combines Adafactor, learning rate, loss and gradients (`tests/test_optimizer_parity.py`):
ten steps from the original's initial values, and two from its checkpoint of step 10 with its
optimizer state. The original computed in float32, convt5 computes in float64. In float32 a hidden
unit close to zero may fall on either side of ReLU's kink: this changes the losses of dconv by
1.3e-5 with AVX-512 instructions, and by 2.4e-7 without them.
"""

HUGGING_FACE = """
## Hugging Face T5

transformers 4.57.6, float32 on both sides (`tests/test_hugging_face.py`). Weights imported into
convt5 and exported again are bit-identical. transformers 5.23 (torch 2.13) loads an exported folder
with logits within the same tolerance.
"""

OPERATORS = """
## Convolutions and blocks

float64 on both sides (`tests/test_convolution.py`, `tests/test_fairseq_block.py`). Operators are
compared relative to the largest element; so are parameter gradients of blocks, which fairseq
stored in float32.
"""

REMARKS = """
## Deliberate differences

- In packed rows, taps stop at the boundary of a segment, so packed and separate rows give the
  same results. In the original, taps read across the boundary.
- Decoding computes the trained function. The original shows the start token to the decoder's
  convolutions in decoding, but hides it in training.
- `BeamSearch` follows the conventions of transformers. Beam search of Mesh TensorFlow considers
  only two continuations of each beam and stops all rows of a batch together; `MeshTFBeamSearch`
  lists all differences.

## Memory of an import

`python -m convt5.convert --from=mesh_tf --optimizer` imports a checkpoint of the size of dconv
large (1,191,864,320 parameters in bfloat16 with optimizer state, random values) in 82 s on two
CPU cores. The peak memory is 7.9 GiB (maximum resident set size by `/usr/bin/time -v`).

## Not verified

The released checkpoints themselves were not available. The original code, built at the sizes of
the release, matches the stated sizes of the large models: lconv within 0.3 % (738.9M, stated
741M), dconv in all given digits (1.19B, stated 1.2B). It does not match the others: lconv small
60.9M (stated 67M), lconv base 223.6M (210M), dconv base 351.0M (324M). The released small and
base models may therefore hold other layers. The import refuses unknown variables and names every
missing one.
"""


def shown(difference: float | None) -> str:
    if difference is None:
        return "equal"
    digits, _, exponent = f"{difference:.1e}".partition("e")
    return "0" if difference == 0 else f"{digits.removesuffix('.0')}e{int(exponent)}"


Found = Iterator[tuple[str, float, float | None]]
"""Name, tolerance and difference of each quantity of one column."""


def table(columns: dict[str, Callable[[], Found]]) -> str:
    """Returns a table of quantities by columns; quantities that a column lacks stay empty."""
    found = {column: list(compare()) for column, compare in columns.items()}
    names = list(dict.fromkeys(name for rows in found.values() for name, *_ in rows))
    lines = [
        f"| quantity | {' | '.join(columns)} | tolerance |",
        f"|---|{'---|' * (len(columns) + 1)}",
    ]
    for name in names:
        by_column = {c: row for c, rows in found.items() for row in rows if row[0] == name}
        tolerance = next(iter(by_column.values()))[1]
        cells = [shown(by_column[c][2]) if c in by_column else "" for c in columns]
        equal = any(row[2] is None for row in by_column.values())
        lines.append(f"| {name} | {' | '.join(cells)} | {'equal' if equal else shown(tolerance)} |")
    return "\n".join(lines)


def mesh_differences(folder: pathlib.Path) -> Found:
    ref, ours, original = mesh.reference(folder), mesh.computed(folder), mesh.imported(folder)

    def row(name, a, b, where=...):
        return name, mesh.TOLERANCE, mesh.largest(a, b, where)

    yield row("encoder output", ours["encoded"], ref["encoder_output"])
    yield row("logits", ours["logits"], ref["logits"], ref["targets"] > 0)
    yield row("loss, evaluation", ours["loss_eval"], ref["loss_eval"])
    yield row("loss, training (z-loss)", ours["loss_train"], ref["loss_train"])
    gradients = take_apart(original.sources, dict(named_leaves(ours["gradients"])))
    norms = {name: ref[f"grad_l2/{name}"] for name in gradients}
    relative = [abs(np.linalg.norm(g) / norms[name] - 1) for name, g in gradients.items()]
    yield "gradient norm of each variable, relative", mesh.TOLERANCE, float(max(relative))
    sums = [abs(g.sum(dtype=np.float64) - ref[f"grad_sum/{n}"]) for n, g in gradients.items()]
    yield "gradient sum of each variable", mesh.TOLERANCE, float(max(sums))
    crossing = mesh.changed(original, taps_cross_segments=True)
    packed = mesh.compute_packed(crossing, mesh.plain_batch(ref, "packed_"))
    real = ref["packed_targets_segmentation"] > 0
    yield row("packed rows, encoder output", packed["encoded"], ref["packed_encoder_output"])
    yield row("packed rows, logits", packed["logits"], ref["packed_logits"], real)
    yield row("packed rows, loss", packed["loss_eval"], ref["packed_loss_eval"])
    length = ref["greedy_ids"].shape[1]
    ids = mesh.greedy(original.model(), ref["inputs"], length, hide_start_token=False)
    yield same_ids("greedy ids", ids, ref["greedy_ids"])
    yield same_ids("beam-4 ids", mesh.beam(original.model(), ref), ref["beam4_ids"])


def training_differences(folder: pathlib.Path) -> Found:
    recorded = np.load(folder / "train.npz")
    _, imported, settings = optimizer.read(folder, 0)
    yield from trajectory("A", imported, settings, recorded)
    checkpoint, imported, settings = optimizer.read(folder, 10)
    moments = mesh_tf.read_moments(checkpoint, imported)
    rows = optimizer.batches(recorded, [10, 11])
    _, metrics = optimizer.train(imported, settings, rows, moments)
    difference = mesh.largest(metrics["loss"], recorded["resume_loss"])
    yield "losses of 2 resumed steps", optimizer.TOLERANCE, difference
    if folder.name in optimizer.FACTORED:
        _, imported, settings = optimizer.read(folder, 0)
        factored = optimizer.factored(imported, settings)
        yield from trajectory("B (factored)", *factored, np.load(folder / "train_factored.npz"))


def trajectory(name: str, imported, settings, recorded) -> Found:
    rows = optimizer.batches(recorded, range(10))
    state, metrics = optimizer.train(imported, settings, rows)
    loss = mesh.largest(metrics["loss"], recorded["loss"])
    yield f"losses of 10 steps, {name}", optimizer.TOLERANCE, loss
    final = optimizer.final_variables(state, imported)
    difference = max(mesh.largest(v, recorded[f"final/{n}"]) for n, v in final.items())
    yield f"variables after 10 steps, {name}", optimizer.TOLERANCE, difference


def hugging_face_differences(folder: pathlib.Path) -> Found:
    ref, model = hf.reference(folder), hf.imported(folder).model()

    def row(name, a, b, where=...):
        return name, hf.TOLERANCE, hf.largest(a, b, where)

    encoded = model.encode(ref["input_ids"])
    real = ref["attention_mask"] > 0
    yield row("encoder output", encoded, ref["encoder_last_hidden_state"], real)
    logits = model(ref["input_ids"], ref["decoder_input_ids"])
    yield row("logits", logits, ref["logits"], ref["labels"] != -100)
    long = model(ref["long_input_ids"], ref["long_decoder_input_ids"])
    yield row("logits, distances beyond 128", long, ref["long_logits"])
    loss, gradients = hf.loss_and_gradients(folder)
    yield row("loss", loss, ref["loss"])
    recorded = load_file(folder / "grads.safetensors")
    difference = max(hf.largest(g, recorded[name]) for name, g in gradients.items())
    yield "gradient of each parameter", hf.TOLERANCE, difference
    length = ref["greedy_ids"].shape[1] - 1
    greedy = hf.decode(model, ref["input_ids"], max_length=length, strategy=hf.Greedy())
    yield same_ids("greedy ids", greedy.tokens[:, 0], ref["greedy_ids"][:, 1:])
    beams = hf.decode(model, ref["input_ids"], max_length=length, strategy=hf.BeamSearch())
    width = ref["beam4_ids"].shape[-1] - 1
    yield same_ids("beam-4 ids", beams.tokens[:, :, :width], ref["beam4_ids"][:, :, 1:])
    yield row("beam-4 scores", beams.scores, ref["beam4_scores"])


def block_differences(golden: pathlib.Path, name: str) -> Found:
    case, arrays = fairseq.recorded(golden, name)
    with pytest.MonkeyPatch.context() as patch:
        y, d_x, gradients = fairseq.computed(golden, name, patch)
    expected = fairseq.ours(case, fairseq.group(arrays, "grad."))

    def row(quantity, ours, theirs):
        return quantity, fairseq.TOLERANCE, mesh.largest(ours, np.asarray(theirs))

    yield row("output", y, fairseq.batch_first(arrays["y"]))
    yield row("gradient of the input", d_x, fairseq.batch_first(arrays["dx"]))
    relative = [
        mesh.largest(gradients[path], value) / np.abs(value).max()
        for path, value in expected.items()
    ]
    yield "gradients of the parameters", 1e-7, max(relative)


def operator_differences(test: Callable, golden: pathlib.Path) -> Found:
    """The largest relative error that one of `test_convolution`'s tests sees."""
    errors = []

    def relative_error(*arrays):
        errors.append(original(*arrays))
        return errors[-1]

    original = convolution.relative_error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "relative_error", relative_error)
        test(golden, None, convolution.EXACT)
    yield "output and gradients of every case", convolution.EXACT[1], float(max(errors))


def same_ids(name: str, ours, theirs) -> tuple[str, float, float | None]:
    different = int((np.asarray(ours) != theirs).sum())
    return name, 0.0, float(different) if different else None


def main(golden: pathlib.Path) -> None:
    families = {family.removesuffix("_tiny"): family for family in mesh.FAMILIES}

    def each(compare, folder, names):
        return table({c: lambda n=n: compare(folder / n) for c, n in names.items()})

    print(INTRODUCTION + MESH)
    print(each(mesh_differences, golden / "mesh_tf", families))
    print(TRAINING)
    with jax.enable_x64(True):
        print(each(training_differences, golden / "mesh_tf", families))
    print(HUGGING_FACE)
    print(each(hugging_face_differences, golden / "hf_t5", {"1.0": "v1_0", "1.1": "v1_1"}))
    print(OPERATORS)
    with jax.enable_x64(True):
        tests = {
            "fairseq, lightweight": convolution.test_lightweight_convolutions_equal_fairseq,
            "fairseq, dynamic": convolution.test_dynamic_convolutions_equal_fairseq,
            "loops, dilated": convolution.test_dilated_convolutions_equal_the_recorded_ones,
        }
        operators = {c: lambda t=t: operator_differences(t, golden) for c, t in tests.items()}
        print(table(operators), end="\n\n")
        blocks = {name: lambda n=name: block_differences(golden, n) for name in fairseq.CASES}
        print(table(blocks).replace("| quantity |", "| fairseq block |", 1))
    print(REMARKS, end="")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
