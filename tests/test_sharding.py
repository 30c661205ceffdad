"""The mesh and the rule tables: what goes where, and what is refused before anything runs."""

import jax
import pytest
from jax.sharding import PartitionSpec as P
from test_model import VARIANTS, tiny_config

from convt5.errors import UserError
from convt5.modeling import sharding
from convt5.modeling.placement import TEXT_RULES
from convt5.modeling.sharding import MeshConfig, Rule
from convt5.modeling.tree_paths import named_leaves
from convt5.training.optimizer import AdafactorConfig, AdamWConfig
from convt5.training.schedule import Constant
from convt5.training.train_state import abstract_state, state_shardings


def abstract(**shapes: tuple[int, ...]):
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def mesh_of(**sizes: int):
    return MeshConfig(**sizes).build()


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (MeshConfig(), (8, 1, 1, 1)),
        (MeshConfig(tensor=2), (4, 1, 1, 2)),
        (MeshConfig(data=2, fsdp=-1, tensor=2), (2, 2, 1, 2)),
        (MeshConfig(data=1, fsdp=8), (1, 8, 1, 1)),
        (MeshConfig(sequence=4), (2, 1, 4, 1)),
        (MeshConfig(data=1, sequence=-1, tensor=2), (1, 1, 4, 2)),
    ],
)
def test_minus_one_takes_the_remaining_devices(config, sizes):
    assert tuple(config.build().shape.values()) == sizes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tensor": 3},
            r"tensor=3\) needs a number of .* a multiple of 3.* there are 8; choose sizes",
        ),
        ({"data": 2, "fsdp": 2}, "multiple of 4, but there are 8"),
        ({"data": 0}, "data=0 must be a positive integer, or -1"),
        ({"fsdp": -1}, "only one axis can take the remaining devices"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        mesh_of(**sizes)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mlp", ["relu", "gated_gelu"])
def test_the_text_table_places_every_parameter_of_every_variant(variant, mlp):
    config = tiny_config(
        variant,
        mlp=mlp,
        mlp_bias=True,
        norm="layer",
        tie_output=mlp == "relu",
        positions="learned" if mlp == "relu" else "relative",
        max_positions=8,
    )
    model = abstract_state(config, AdafactorConfig().build(Constant(rate=1.0))).model
    specs = sharding.parameter_specs(model, TEXT_RULES)
    assert list(specs) == [name for name, _ in named_leaves(model)]
    assert specs["encoder/layers/1/mlp/wo/kernel"] == P("tensor", "fsdp")
    assert specs["decoder/layers/0/cross_attention/query/kernel"] == P("fsdp", "tensor")


@pytest.mark.parametrize(
    "optimizer",
    [AdafactorConfig(), AdafactorConfig(min_dim_to_factor=8), AdamWConfig()],
    ids=["whole", "factored", "adamw"],
)
def test_optimizer_state_lies_where_its_parameter_lies(optimizer):
    state = abstract_state(tiny_config("released"), optimizer.build(Constant(rate=1.0)))
    shardings = state_shardings(state, mesh_of(fsdp=2, tensor=2), TEXT_RULES)
    placed = dict(named_leaves(shardings))
    parameters = dict(named_leaves(state.model))
    for name, leaf in named_leaves(state.opt_state):
        owner = next((p for p in parameters if f"/{p}" in f"{name}/"), None)
        if owner is None:
            assert leaf.shape == ()
            continue
        kept = [a == b for a, b in zip(leaf.shape, parameters[owner].shape, strict=True)]
        spec = placed[f"model/{owner}"].spec
        expected = P(*(axes if k else None for axes, k in zip(spec, kept, strict=True)))
        assert placed[f"opt_state/{name}"].spec == expected


def test_the_first_rule_that_matches_decides():
    rules = (Rule("a/w$", ("data",)), Rule("w$", (None, "tensor")))
    specs = sharding.parameter_specs({"a": abstract(w=(2, 3)), "b": abstract(w=(2, 3))}, rules)
    assert specs == {"a/w": P("data", None), "b/w": P(None, "tensor")}


def test_all_faults_of_a_table_are_listed_together():
    rules = (Rule("absent"), Rule("^v", (None, "data")), Rule("optional", optional=True))
    with pytest.raises(UserError) as error:
        sharding.parameter_specs(abstract(v=(4,), w=(4, 4)), rules)
    for message in (
        "no rule matches parameter w (4, 4)",
        "rule '^v' names 2 axes, but parameter v has shape (4,)",
        "rule 'absent' applies to no parameter",
    ):
        assert message in str(error.value)
    assert "optional'" not in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "axes", "message"),
    [
        ("[", (), r"pattern: '\[' is no regular expression"),
        ("w$", ("modle",), "'modle' must be one of data, fsdp, sequence, tensor"),
        ("w$", (("fsdp", "tensr"), None), "'tensr' must .* Did you mean tensor"),
        ("w$", ("fsdp", ("tensor", "fsdp")), "fsdp twice"),
        ("w$", (0,), "0 must be one of"),
        ("w$", (("fsdp", None),), "None must be one of"),
        ("w$", "tensor", r"axes='tensor' must be a list"),
    ],
)
def test_a_rule_that_cannot_be_is_named(pattern, axes, message):
    with pytest.raises(UserError, match=f"Rule: .*{message}"):
        Rule(pattern, axes)


def test_a_rule_may_be_given_lists_as_gin_files_write_them():
    rule = Rule("w$", [["fsdp", "tensor"], None])  # pyright: ignore[reportArgumentType]
    assert rule == Rule("w$", (("fsdp", "tensor"), None))
    assert hash(rule)


def test_an_axis_that_the_mesh_does_not_divide_is_named():
    params = abstract(w=(6, 4))
    with pytest.raises(
        UserError, match=r"w \(6, 4\) has an axis of 6 that fsdp=2 \* tensor=2 must"
    ):
        sharding.tree_shardings(
            params, params, mesh_of(fsdp=2, tensor=2), [Rule("w", (("fsdp", "tensor"),))]
        )


def test_state_that_resembles_no_parameter_is_named():
    params = abstract(w=(4,))
    with pytest.raises(UserError, match=r"extra \(3,\) is neither a scalar nor shaped like"):
        sharding.tree_shardings(abstract(w=(4,), extra=(3,)), params, mesh_of(), [Rule("w")])


def test_parameters_in_use_are_split_by_tensor_only():
    params = abstract(w=(4, 4), v=(8,))
    rules = [Rule("w", ("fsdp", "tensor")), Rule("v", (("tensor", "fsdp"),))]
    placed = sharding.tree_shardings(params, params, mesh_of(fsdp=2, tensor=2), rules)
    used = sharding.without_fsdp(placed)
    assert used["w"].is_equivalent_to(jax.NamedSharding(used["w"].mesh, P(None, "tensor")), 2)
    assert used["v"].is_equivalent_to(jax.NamedSharding(used["v"].mesh, P("tensor")), 1)


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ({}, {"batch_size": 12}, r"batch_size=12 must be a multiple of .* = 8 \* 1 \* 1 = 8"),
        ({"tensor": 4}, {"batch_size": 6, "grad_accum_steps": 2}, r"2 \* 1 \* 2 = 4"),
        ({"fsdp": 4}, {"batch_size": 4}, r"2 \* 4 \* 1 = 8"),
        (
            {"tensor": 4},
            {"batch_size": 8, "tensor_divides": {"num_heads": 6}},
            "num_heads=6 must be a multiple of tensor=4",
        ),
        ({}, {"batch_size": 8, "grad_accum_steps": 0}, "grad_accum_steps=0 must be at least 1"),
        (
            {"sequence": 4},
            {"batch_size": 8, "lengths": {"encoder_length": 64, "decoder_length": 30}},
            r"decoder_length=30 must be a multiple of sequence=4.* set decoder_length to 32, or "
            r"MeshConfig.sequence to a divisor of 30",
        ),
        ({"sequence": 2}, {"batch_size": 8}, "sequence=2 splits rows of tokens, but these"),
    ],
)
def test_a_mesh_that_does_not_divide_batch_or_heads_is_refused(sizes, settings, message):
    with pytest.raises(UserError, match=message):
        sharding.check_mesh(mesh_of(**sizes), **settings)


def test_a_mesh_that_divides_everything_is_accepted():
    settings = {"grad_accum_steps": 2, "tensor_divides": {"num_heads": 12}}
    assert sharding.check_mesh(mesh_of(tensor=2), batch_size=16, **settings) is None
    settings["lengths"] = {"encoder_length": 64, "decoder_length": 12}
    assert sharding.check_mesh(mesh_of(sequence=4), batch_size=16, **settings) is None


def test_lengths_are_split_only_where_the_mesh_says_so():
    rows = P(("data", "fsdp"))
    assert sharding.token_sharding(mesh_of()).spec == rows
    assert sharding.token_sharding(mesh_of(sequence=4)).spec == P(("data", "fsdp"), "sequence")
    # Decoding and images split rows of the batch alone.
    assert sharding.batch_sharding(mesh_of(sequence=4)).spec == rows
