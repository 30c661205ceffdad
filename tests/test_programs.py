"""Compiled programs are found by what they are made from, and compute the same bits."""

import dataclasses
import functools
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.modeling.sharding import MeshConfig
from convt5.training import compilation, programs
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig
from convt5.training.plan import make_plan
from convt5.training.programs import Kept, Outputs, Store
from convt5.training.schedule import Constant, InverseSqrt
from convt5.training.train_step import StepConfig

STACK = StackConfig(num_layers=1, mixing="depthwise")
MODEL = ConvT5Config(
    vocab_size=32,
    emb_dim=8,
    mlp_dim=16,
    num_heads=2,
    head_dim=4,
    dropout_rate=0.1,
    encoder=STACK,
    decoder=STACK,
)
RUN = StepConfig(
    model=MODEL,
    loss=TextLoss(),
    optimizer=AdafactorConfig(),
    schedule=InverseSqrt(),
)
SAME = Outputs(lambda out: out, lambda out: out)


def batch_of(rows: int = 8):
    rng = np.random.default_rng(0)
    sizes = {"encoder_input_tokens": 6, "decoder_input_tokens": 4, "decoder_target_tokens": 4}
    arrays = {n: rng.integers(1, 32, (rows, size), dtype=np.int32) for n, size in sizes.items()}
    return arrays | {"decoder_loss_weights": np.ones((rows, 4), np.int32)}


def place(plan, batch):
    return {name: jax.device_put(array, plan.batch_sharding) for name, array in batch.items()}


def make(folder, config=RUN):
    """A plan whose programs are kept, its initial state, and the compiled step."""
    plan = make_plan(config, batch_size=8).keeping_programs(folder)
    state = plan.init_state()
    return plan, state, plan.compile_train_step(state, place(plan, batch_of()))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture(autouse=True)
def compiled_anew():
    """Without the cache of the tests, in which JAX would find most programs."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def traced(monkeypatch):
    """The names of the functions that JAX lowers."""
    names = []
    load = Kept.load

    def noting(kept, args, lowered=None):
        names.extend([] if lowered is None else [kept.name])
        return load(kept, args, lowered)

    monkeypatch.setattr(Kept, "load", noting)
    return names


@pytest.mark.slow
def test_a_second_start_traces_no_program_and_computes_the_same_bits(tmp_path, traced):
    plan, state, compiled = make(tmp_path)
    sums = plan.eval_step(state.model, place(plan, batch_of()))
    after, metrics = compiled.call(state, place(plan, batch_of()))
    assert traced == ["initial state", "training step", "evaluation"]
    plan, again, kept = make(tmp_path)
    sums_again = plan.eval_step(again.model, place(plan, batch_of()))
    after_again, metrics_again = kept.call(again, place(plan, batch_of()))
    assert traced == ["initial state", "training step", "evaluation"]
    assert jax.tree.structure((after, metrics)) == jax.tree.structure((after_again, metrics_again))
    assert bits((after, metrics, sums)) == bits((after_again, metrics_again, sums_again))
    assert metrics.keys() == metrics_again.keys()
    # The kept step donates its state and tells its costs, too.
    assert kept.was_kept
    assert kept.flops == compiled.flops
    assert kept.temporary_bytes == compiled.temporary_bytes
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(again.model))


@pytest.mark.slow
def test_programs_are_loaded_in_the_background_once_each(tmp_path, monkeypatch):
    make(tmp_path)
    read, threads = Store._read, []

    def noting(store, path):
        threads.append((path.name, threading.current_thread().name.rpartition("_")[0]))
        return read(store, path)

    monkeypatch.setattr(Store, "_read", noting)
    _, _, step = make(tmp_path)
    assert step.was_kept
    assert {thread for _, thread in threads} == {"convt5-programs"}
    assert len(threads) == len(set(threads)) == 2


def test_a_batch_of_other_shape_or_with_other_arrays_is_compiled(tmp_path):
    jitted = jax.jit(lambda batch: sum(jnp.sum(array) for array in batch.values()))

    def was_kept(**batch):
        kept = Kept(Store(tmp_path, "identity", jax.devices()[:1]), "sum", SAME)
        step = compilation.compile_step(jitted, batch, kept=kept)
        assert step.call(batch) == sum(array.size for array in batch.values())
        return step.was_kept

    assert not was_kept(a=jnp.ones(8))
    assert was_kept(a=jnp.ones(8))
    assert not was_kept(a=jnp.ones(16))
    assert not was_kept(a=jnp.ones(8), b=jnp.ones(8))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"loss": TextLoss(z_loss=1e-4)},
        {"schedule": Constant(rate=0.1)},
        {"mesh": MeshConfig(data=4, tensor=2)},
        {"model": dataclasses.replace(MODEL, dropout_rate=0.2)},
        {"frozen": ["token_embedder"]},
        {"grad_accum_steps": 2},
    ],
)
def test_any_other_setting_is_another_program(change):
    other = dataclasses.replace(RUN, **change)
    assert programs.identity(RUN) is not None
    assert programs.identity(RUN) == programs.identity(dataclasses.replace(RUN))
    assert programs.identity(other) not in (None, programs.identity(RUN))


@pytest.mark.parametrize("name", ["XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "LIBTPU_INIT_ARGS"])
def test_variables_of_compilers_are_part_of_a_program(monkeypatch, name):
    before = programs.identity(RUN)
    monkeypatch.setenv(name, f"{os.environ.get(name, '')} --other")
    assert programs.identity(RUN) != before


def test_the_names_that_tensorflow_gives_itself_are_not_part_of_a_program(monkeypatch):
    before = programs.identity(RUN)
    monkeypatch.setenv("TPU_ML_PLATFORM", "another")
    monkeypatch.setenv("TPU_ML_PLATFORM_VERSION", "9")
    assert programs.identity(RUN) == before


def test_settings_of_jax_are_part_of_a_program():
    before = programs.identity(RUN)
    with jax.default_matmul_precision("float32"):
        assert programs.identity(RUN) != before


def test_code_is_part_of_a_program(tmp_path, monkeypatch):
    before = programs.identity(RUN)
    (tmp_path / "changes_convt5.py").write_text("from convt5 import ops\n")
    monkeypatch.syspath_prepend(tmp_path)
    import changes_convt5  # pyright: ignore[reportMissingImports]

    loaded = programs.identity(RUN)
    assert loaded != before
    (tmp_path / "changes_convt5.py").write_text("from convt5 import errors\n")
    assert programs.identity(RUN) != loaded
    assert changes_convt5


class OwnLoss(TextLoss):
    """A loss of a user: nobody knows what else it reads."""


@pytest.mark.parametrize("loss", [OwnLoss(), lambda *_: None, functools.partial(OwnLoss)])
def test_programs_of_unknown_code_are_not_kept(tmp_path, loss):
    config = dataclasses.replace(RUN, loss=loss)
    assert programs.identity(config) is None
    assert make_plan(config, batch_size=8).keeping_programs(tmp_path).programs is None


def kept_in(folder, name="doubled", identity="identity"):
    return Kept(Store(folder, identity, jax.devices()), name, SAME)


def multiplied(factor, name="product"):
    mesh = MeshConfig().build()
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.device_put(jnp.arange(8.0), where)
    return jax.jit(lambda x: {name: factor * x}, in_shardings=where, out_shardings=where), x


def doubled():
    return multiplied(2, "twice")


def test_equal_programs_of_other_settings_are_not_compiled(tmp_path, traced):
    jitted, x = doubled()
    assert not compilation.compile_step(jitted, x, kept=kept_in(tmp_path)).was_kept
    other = kept_in(tmp_path, identity="of other code")
    for was_traced in (True, False):
        traced.clear()
        again = compilation.compile_step(doubled()[0], x, kept=other)
        assert again.was_kept
        assert bool(traced) == was_traced
        np.testing.assert_array_equal(again.call(x)["twice"], 2 * np.arange(8.0))


@pytest.mark.parametrize("change", [{"factor": 3, "name": "twice"}, {"factor": 2, "name": "two"}])
def test_another_program_of_other_settings_is_compiled(tmp_path, change):
    jitted, x = doubled()
    compilation.compile_step(jitted, x, kept=kept_in(tmp_path))
    other, _ = multiplied(**change)
    step = compilation.compile_step(other, x, kept=kept_in(tmp_path, identity="another"))
    assert not step.was_kept
    np.testing.assert_array_equal(step.call(x)[change["name"]], change["factor"] * np.arange(8.0))


def test_a_program_that_jax_found_in_its_cache_is_not_kept(tmp_path, monkeypatch):
    """XLA on CPU would write it without its kernels."""
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    compilation_cache.set_cache_dir(str(tmp_path / "jax"))
    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        for _ in range(2):
            jitted, x = doubled()
            compilation.compile_step(jitted, x)
            jax.clear_caches()
        compilation.compile_step(doubled()[0], x, kept=kept_in(tmp_path))
        assert not list(tmp_path.glob("*.program"))
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
        compilation_cache.set_cache_dir(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, b"\xff/../a", None])
@pytest.mark.parametrize("part", ["program", "*"])
def test_a_damaged_program_is_compiled_again(tmp_path, damage, part):
    jitted, x = doubled()
    compilation.compile_step(jitted, x, kept=kept_in(tmp_path))
    for path in tmp_path.glob(f"*.{part}"):
        path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    again = compilation.compile_step(jitted, x, kept=kept_in(tmp_path))
    assert not again.was_kept
    np.testing.assert_array_equal(again.call(x)["twice"], 2 * np.arange(8.0))
    assert compilation.compile_step(jitted, x, kept=kept_in(tmp_path)).was_kept


def test_only_the_programs_used_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "_MOST_KEPT", 2)

    def is_kept(factor):
        jitted, x = multiplied(factor)
        return compilation.compile_step(jitted, x, kept=kept_in(tmp_path, str(factor))).was_kept

    for age, factor in enumerate([1, 2]):
        assert not is_kept(factor)
        for path in tmp_path.glob("*.program"):
            os.utime(path, (age, age) if path.stat().st_mtime > 10 else None)
    assert is_kept(1)
    assert not is_kept(3)
    assert [is_kept(factor) for factor in (1, 3, 2)] == [True, True, False]


def test_a_program_that_cannot_be_written_is_used_all_the_same(tmp_path):
    jitted, x = doubled()
    step = compilation.compile_step(jitted, x, kept=kept_in(tmp_path / "absent"))
    np.testing.assert_array_equal(step.call(x)["twice"], 2 * np.arange(8.0))


@dataclasses.dataclass(frozen=True)
class CountedConfig:
    """Counts how often the model is built, that is traced."""

    built: list[int]

    def build(self, key):
        self.built.append(1)
        return MODEL.build(key)


@pytest.mark.slow
def test_shapes_and_values_of_the_initial_state_come_from_one_trace():
    config = CountedConfig([])
    plan = make_plan(dataclasses.replace(RUN, model=config), batch_size=8)
    state = plan.init_state()
    assert len(config.built) == 1
    assert jax.tree.structure(state) == jax.tree.structure(plan.abstract)


@pytest.mark.parametrize("part", ["program", "note"])
@pytest.mark.parametrize("who", ["group", "others", "folder", "owner", "link"])
def test_a_program_that_another_user_may_have_written_is_not_run(tmp_path, monkeypatch, who, part):
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o700)
    double = jax.jit(lambda x: 2 * x)
    args = (jnp.ones(3),)
    kept = Kept(Store(folder, "identity", jax.devices()[:1]), "double", SAME)
    lowered = double.lower(*args)
    kept.save(args, lowered, lowered.compile(), {})
    for path in folder.iterdir():
        path.chmod(0o600)
    (path,) = folder.glob(f"*.{part}")
    assert kept.load(args) is not None
    if who in ("group", "others"):
        path.chmod(0o620 if who == "group" else 0o602)
    elif who == "folder":
        folder.chmod(0o777)
    elif who == "owner":
        monkeypatch.setattr(os, "getuid", lambda: os.stat(path).st_uid + 1)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert kept.load(args) is None
