"""Random mistakes of users: gin settings, gin files and flags that are slightly or wildly wrong.

`outcome` calls a command in this process as `command_line.run` does and says how it ended.
"""

import contextlib
import importlib
import io
import pathlib
import random
import re
import signal
import traceback
import warnings

from hypothesis import strategies as st

from convt5 import errors
from convt5.runtime import multi_host

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT_SECS = 60

VALUES = [
    *("", " ", "nan", "inf", "-inf", "1e400", "1e-400", "-1", "0", "1", "2", "-0.0", "0.5", "3.7"),
    *(
        "10**9",
        "1000000000000",
        "9" * 40,
        "9" * 400,
        "-" + "9" * 40,
        "4294967296",
        "True",
        "None",
        "...",
        "()",
    ),
    *("''", "'x'", "[]", "[0]", "[1, 'a']", "[[[]]]", "(1, 2)", "{}", "{'a': 1}", "{1: [2]}"),
    *(
        "[" * 200,
        "'unterminated",
        '"',
        "%",
        "@",
        "%NOTHING",
        "@nothing()",
        "@trainer.train",
        "%RUN_DIR",
    ),
    *("@architecture.StackConfig()", "@architecture.StackConfig", "@os.system", "@gin.REQUIRED"),
    *(
        "ünïcödé",
        "日本語",
        "\udcff",
        "a b c",
        "a/../../b",
        "/dev/null/file",
        "-",
        "--",
        "=",
        "#",
    ),
    *(
        "lambda: 1",
        "__import__('os')",
        "dynamic",
        "float32",
        "int4",
        "CENTERED",
        "validation",
        "latest",
    ),
    *("5,6", "1:2", "*.txt", "{split}", "%s%n", "\\", "\t"),
]
SMALL = ("tiny", "micro")


def gin_files(pattern):
    folder = ROOT / "gin"
    return sorted(f"gin/{path.relative_to(folder)}" for path in folder.glob(pattern))


RUNS = gin_files("runs/*.gin")
IMAGE_RUNS = [name for name in RUNS if "image" in name or "digits" in name]
TEXT_RUNS = [name for name in RUNS if name not in IMAGE_RUNS]
MODELS = gin_files("models/*.gin")
TEXT_MODELS = [name for name in MODELS if "vit" not in name and any(s in name for s in SMALL)]
STUDIES = gin_files("studies/*.gin")
COMMANDS = ("train", "eval", "infer", "inspect", "convert", "bench", "cache", "sweep")
DRY = ("train", "eval", "infer", "sweep")  # They can be asked to write nothing.
OFTEN = (
    *("trainer.train.num_steps", "trainer.train.seed", "trainer.train.grad_accum_steps"),
    *("trainer.train.eval_every_steps", "trainer.train.log_every_steps", "trainer.train.run_dir"),
    *("trainer.train.mesh", "trainer.train.stall_warning_secs", "trainer.train.data_shards"),
    *("sharding.MeshConfig.data", "sharding.MeshConfig.fsdp", "sharding.MeshConfig.tensor"),
    *("architecture.ConvT5Config.num_heads", "architecture.ConvT5Config.emb_dim"),
    *("architecture.ConvT5Config.mlp_dim", "architecture.ConvT5Config.vocab_size"),
    *("architecture.ConvT5Config.dropout_rate", "architecture.ConvT5Config.dtype"),
    *("architecture.ConvT5Config.positions", "architecture.ConvT5Config.remat"),
    *("architecture.StackConfig.num_layers", "architecture.StackConfig.kernel_size"),
    *("architecture.StackConfig.dilation", "encoder/architecture.StackConfig.mixing"),
    *("architecture.StackConfig.num_kernels", "encoder/architecture.StackConfig.padding"),
    *("architecture.StackConfig.attention_layers", "decoder/architecture.StackConfig.dilation"),
    *("optimizer.AdafactorConfig.max_grad_norm", "optimizer.AdafactorConfig.decay_exponent"),
    *("optimizer.AdafactorConfig.stacked", "schedule.InverseSqrt.warmup_steps"),
    *("data.DataConfig.mixture", "data.DataConfig.batch_size", "data.DataConfig.encoder_length"),
    *("data.DataConfig.decoder_length", "data.DataConfig.pack", "data.DataConfig.seed"),
    *("train/data.DataConfig.split", "checkpoint.CheckpointConfig.every_steps"),
    *("checkpoint.CheckpointConfig.keep_last", "checkpoint.CheckpointConfig.best_metric"),
)


def names_in(files):
    """Every setting and macro that gin files bind, or those which they include."""
    found = set()
    for file in files:
        text = (ROOT / file).read_text()
        found |= set(re.findall(r"^([\w./]+)\s*=", text, re.MULTILINE))
        found |= names_in(re.findall(r"^include '(.+)'", text, re.MULTILINE))
    return found


def flags_of(command):
    """The flags of a command, but those that join other processes and wait for them."""
    flags = importlib.import_module(f"convt5.{command}").COMMAND.flags
    return [flag for flag in flags if flag not in multi_host.FLAGS]


@st.composite
def misspelt(draw, name):
    """A name with one character gone, twice, or replaced."""
    if not name:
        return "x"
    at = draw(st.integers(0, len(name) - 1))
    middle = draw(st.sampled_from(["", name[at] * 2, "x", "/", ".", " ", "é"]))
    return name[:at] + middle + name[at + 1 :]


@st.composite
def changed_text(draw, text):
    """A gin file with some lines gone, twice, exchanged or garbled."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        kind = draw(st.sampled_from(["drop", "twice", "swap", "garble", "value", "junk"]))
        if kind == "drop":
            del lines[at]
            lines = lines or [""]
        elif kind == "twice":
            lines.insert(at, line)
        elif kind == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], line
        elif kind == "garble":
            lines[at] = draw(misspelt(line))
        elif kind == "value" and "=" in line:
            lines[at] = line.partition("=")[0] + "= " + draw(st.sampled_from(VALUES))
        else:
            lines.insert(at, draw(st.sampled_from(VALUES)))
    return "\n".join(lines) + "\n"


@st.composite
def arguments(draw, command, run):
    """Arguments of a command with up to three mistakes; also texts of files they name.

    Args:
        command: its name.
        run: a run directory with a checkpoint.
    """
    value = st.one_of(
        st.sampled_from(VALUES),
        st.integers(1, 10).map(lambda n: str(2**n)),
        st.integers(-3, 40).map(str),
        st.floats().map(str),
        st.floats(0, 1).map(str),
    )
    base, flags, files = draw(st.sampled_from(BASES[command])), [], {}
    flags += [flag.format(run=run) for flag in FLAGS[command]]
    names = sorted(names_in(base))
    if not any("vit" in name or "image" in name or "digits" in name for name in base):
        names += OFTEN
    for _ in range(draw(st.sampled_from([1, 1, 1, 1, 2, 3]))):
        kinds = ["value", "value", "value", "value", "name", "file", "text"] if base else ["file"]
        mistake = draw(st.sampled_from([*kinds, "flag", "flag"]))
        if mistake == "value":
            flags.append(f"--gin.{draw(st.sampled_from(names))}={draw(value)}")
        elif mistake == "name":
            name = draw(misspelt(draw(st.sampled_from(names))))
            flags.append(f"--gin.{name}={draw(value)}")
        elif mistake == "flag":
            flag = draw(st.sampled_from([flag.name for flag in flags_of(command)]))
            if draw(st.integers(0, 5)) == 0:
                flag = draw(misspelt(flag))
            flags.append(f"--{flag}={draw(value)}" if draw(st.integers(0, 3)) else f"--{flag}")
        elif mistake == "file":
            flags.append(f"--gin_file={draw(value)}")
        elif not files:
            at = draw(st.integers(0, len(base) - 1))
            files["mine.gin"] = draw(changed_text((ROOT / base[at]).read_text()))
            base = [*base[:at], "mine.gin", *base[at + 1 :]]
    return [f"--gin_file={name}" for name in base] + flags, files


BASES = {
    "train": [
        *([run, model] for run in TEXT_RUNS for model in TEXT_MODELS),
        *([run] for run in RUNS * 4),
    ],
    "eval": [[]],
    "infer": [[]],
    "inspect": [[model] for model in MODELS],
    "convert": [[]],
    "bench": [[model] for model in MODELS],
    "cache": [[run] for run in TEXT_RUNS],
    "sweep": [[study] for study in STUDIES],
}
"""Gin files that are given together."""
FLAGS = {
    "train": ["--gin.RUN_DIR=run", "--dry_run"],
    "eval": ["--checkpoint={run}", "--dry_run"],
    "infer": ["--checkpoint={run}", "--input={run}/config.gin", "--dry_run"],
    "inspect": [],
    "convert": ["--from=run", "--to=safetensors", "--checkpoint={run}", "--output_dir=out"],
    "bench": [],
    "cache": ["--output_dir=out"],
    "sweep": ["--dry_run"],
}


class Accepted(BaseException):
    """Raised in the place of what a command would go on to do for a long time."""


class TooLong(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds):
    """Raises where something takes longer, a hang among them."""

    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(command, argv):
    """Returns "success", "error" (one message, exit code 2), or what went wrong instead."""
    main = importlib.import_module(f"convt5.{command}").main
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    try:
        with limited(LIMIT_SECS), quiet[0], quiet[1], warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = main(argv)
    except Accepted:
        return "success"
    except SystemExit as exit_:
        code = exit_.code
    except TooLong:
        return f"took more than {LIMIT_SECS} s"
    except errors.UserError as error:
        text = str(error)
        if error.exit_code != 2 or not text.strip() or "Traceback" in text:
            return f"exit code {error.exit_code} with the message {text!r}"
        return "error"
    except Exception:
        return traceback.format_exc()
    return "success" if not code else f"exit code {code}"


def flipped(content, seed):
    """Returns bytes of which one bit, a few bytes, or the end is another: what `seed` says."""
    generator = random.Random(seed)
    damaged = bytearray(content)
    if seed % 3 == 0:
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    elif seed % 3 == 1:
        for _ in range(4):
            damaged[generator.randrange(len(damaged))] = generator.choice([0, 127, 128, 255])
    else:
        del damaged[generator.randrange(len(damaged)) :]
    return bytes(damaged)
