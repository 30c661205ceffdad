"""Launch scripts: no fault that shellcheck sees, every command shown, manifests of the right form.

No cloud is called: a stand-in for gcloud plays a slice that is preempted.
"""

import copy
import json
import os
import pathlib
import shutil
import sys
import tarfile

import commands
import jobset_schema
import pytest
from quick import quick

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
FLAGS = ["--gin_file=a.gin", "--gin.RUN_DIR=gs://bucket/my run"]
NO_NAMES = ["", "1A", "A-B", "A B", "ä", "A;id", "$A"]
QUOTED = r"--gin.RUN_DIR=gs://bucket/my\ run"


def call(script, *arguments, env=None):
    program = sys.executable if script.endswith(".py") else "bash"
    return commands.run(
        [program, ROOT / "launch" / script, *arguments],
        cwd=ROOT if env is None else None,
        env=env,
    )


def shown(script, *arguments):
    done = call(script, *arguments, "--", *FLAGS)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:/usr/bin")
    if shellcheck is None:
        pytest.skip("shellcheck is absent: it comes with the extra dev")
    done = commands.run([shellcheck, script])
    assert done.returncode == 0, done.stdout


class TestTpuVm:
    ARGUMENTS = ("conv", "us-west4-a", "--accelerator_type=v5litepod-16", "--spot")

    def test_a_dry_run_of_keep_shows_every_command(self):
        lines = shown("tpu_vm.sh", "--dry_run", "keep", *self.ARGUMENTS).splitlines()
        commands = [" ".join(line.split()[:5]) for line in lines if line.startswith("gcloud")]
        assert commands == [
            "gcloud compute tpus queued-resources create",
            "gcloud compute tpus queued-resources describe",
            "gcloud compute tpus tpu-vm scp",
            "gcloud compute tpus tpu-vm ssh",
            "gcloud compute tpus tpu-vm ssh",
            "gcloud compute tpus queued-resources describe",
            "gcloud compute tpus tpu-vm ssh",
            "gcloud compute tpus tpu-vm ssh",
            "gcloud compute tpus queued-resources delete",
        ]
        create = next(line for line in lines if "create" in line)
        assert "--spot" in create.split()
        assert "--runtime-version=v2-alpha-tpuv5-lite" in create.split()

    def test_what_starts_on_the_workers_is_a_shell_command_with_the_flags(self, tmp_path):
        # What the shell of a worker would run, with a stand-in for Python that shows its arguments.
        remote = self.on_workers("start", "--env=WORD=a b")
        self.python(tmp_path, 'printf "<%s>" "$WORD" "$@"\nexit 7')
        commands.run(["bash", "-c", f"{remote} wait"], cwd=tmp_path, check=True)
        folder = tmp_path / "convt5"
        assert (folder / "exit_code").read_text() == "7\n"
        arguments = ["a b", "-m", "convt5.train", "--multi_host", *FLAGS]
        expected = "".join(f"<{argument}>" for argument in arguments)
        assert (folder / "train.log").read_text() == expected
        assert (folder / "pid").read_text().strip().isdigit()

    def on_workers(self, action, *options):
        """Returns the shell command that an action runs on the workers."""
        text = shown("tpu_vm.sh", "--dry_run", action, "conv", "zone", *options)
        (line,) = (line for line in text.splitlines() if "--worker=all" in line)
        return commands.run(
            ["bash", "-c", f'set -- {line}; printf %s "${{@: -1}}"'],
            check=True,
        ).stdout.removeprefix("--command=")

    def python(self, folder, script):
        """Writes a stand-in for Python on a worker."""
        path = folder / "convt5" / ".venv" / "bin" / "python"
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    @pytest.mark.parametrize(
        ("code", "stopped", "found"),
        [(143, True, "130\n"), (143, False, "143\n"), (0, True, "0\n"), (1, True, "1\n")],
    )
    def test_a_run_that_someone_stopped_is_told_from_one_that_the_cloud_stopped(
        self, tmp_path, code, stopped, found
    ):
        # The signal asks it to save; it ends with the code.
        script = f"trap 'exit {code}' TERM\ntouch ready\nwhile true; do sleep 0.05; done"
        self.python(tmp_path, script)
        folder = tmp_path / "convt5"
        (folder / "stopped").touch()  # Of the run before.
        start = f"{self.on_workers('start')} wait"
        started = commands.start(["bash", "-c", start], cwd=tmp_path)
        both = (folder / "ready", folder / "pid")
        commands.wait_until(lambda: all(path.exists() for path in both))
        stop = self.on_workers("stop") if stopped else "xargs kill -TERM < convt5/pid"
        commands.run(["bash", "-c", stop], cwd=tmp_path, check=True)
        assert started.wait(300) == 0
        assert (folder / "exit_code").read_text() == found

    @pytest.mark.parametrize("missing", ["convt5", "python", "pid"])
    def test_start_fails_where_training_cannot_begin(self, tmp_path, missing):
        script = self.on_workers("start").replace("seq 100", "seq 2")
        if missing != "convt5":
            self.python(tmp_path, "exit 0")
        if missing == "python":
            (tmp_path / "convt5" / ".venv" / "bin" / "python").chmod(0o644)
        if missing == "pid":
            (tmp_path / "convt5" / "train.log").mkdir()
        assert self.shell(script, tmp_path) != 0
        assert not (tmp_path / "convt5" / "exit_code").exists()

    def test_start_and_stop_know_whether_training_runs(self, tmp_path):
        self.python(tmp_path, "touch started; while [ ! -e ended ]; do sleep 0.05; done")
        start, stop = self.on_workers("start"), self.on_workers("stop")
        folder = tmp_path / "convt5"
        assert self.shell(stop, tmp_path) != 0  # Nothing runs, and no stale number is killed.
        assert self.shell(start, tmp_path) == 0
        pid = (folder / "pid").read_text()
        assert self.shell(start, tmp_path) != 0
        assert (folder / "pid").read_text() == pid
        (folder / "ended").touch()

    def shell(self, script, folder):
        """Runs what a worker would run; returns its exit code."""
        command = ["bash", "-c", script]
        return commands.run(command, cwd=folder).returncode

    # Runs what the worker would run in a folder, but for the installation.
    WORKER = """
case "$*" in
  *'queued-resources describe'*) ((created > deleted)) && echo ACTIVE || echo NOT_FOUND ;;
  *'uv sync'*) ;;
  *'tpu-vm ssh'*)
    for argument; do
      case $argument in --command=*) cd worker; exec bash -c "${argument#--command=}" ;; esac
    done ;;
esac"""

    @pytest.mark.slow
    def test_training_whose_wrapper_is_killed_is_a_failure_once_it_has_ended(self, tmp_path):
        self.python(tmp_path / "worker", "sleep 0.2; kill -KILL $PPID; sleep 0.3; touch trained")
        done, calls = self.act("keep", tmp_path, self.WORKER)
        assert done.returncode == 1, done.stderr
        assert (tmp_path / "worker" / "convt5" / "trained").exists()
        assert calls.count("convt5.train --multi_host") == 3
        assert done.stderr.count("left no exit code (2 of 2)") == 3
        assert calls.count("queued-resources delete") == 3

    def test_training_of_a_worker_that_rebooted_is_a_failure_at_the_second_look(self, tmp_path):
        folder = tmp_path / "worker" / "convt5"
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "pid").write_text(f"{os.getpid()}\n")  # Another process has its number now.
        (tmp_path / "calls").write_text("queued-resources create\n")
        done, calls = self.act("wait", tmp_path, self.WORKER)
        assert done.returncode == 1, done.stderr
        assert calls.count("cat convt5/exit_code") == 2

    def test_a_worker_that_never_answers_is_given_up(self, tmp_path):
        done, calls = self.act(
            "wait",
            tmp_path,
            """
case "$*" in
  *'queued-resources describe'*) echo ACTIVE ;;
  *) echo 'ERROR: timed out' >&2; exit 255 ;;
esac""",
        )
        assert done.returncode == 1
        assert "worker 0 of conv does not answer (10 of 10): ERROR: timed out" in done.stderr
        assert calls.count("cat convt5/exit_code") == 10

    def test_keep_given_again_waits_for_the_training_that_runs(self, tmp_path):
        done, calls = self.keep(
            tmp_path,
            """
asked=$(grep -c 'cat convt5/exit_code' calls)
case "$*" in
  *'queued-resources describe'*) echo ACTIVE ;;
  *'cat convt5/exit_code'*) if ((asked < 3)); then echo running; else echo 0; fi ;;
esac""",
        )
        assert done.returncode == 0, done.stderr
        assert "training runs on conv already" in done.stderr
        assert "convt5.train" not in calls
        assert "tpu-vm scp" not in calls

    @pytest.mark.parametrize("name", NO_NAMES)
    def test_a_variable_whose_name_is_no_name_is_a_usage_error(self, name):
        done = call("tpu_vm.sh", "--dry_run", "start", "n", "z", f"--env={name}=x", "--", *FLAGS)
        assert done.returncode == 2
        assert f"--env={name}=x must be --env=NAME=VALUE" in done.stderr
        done = call("gke.py", "manifest", *TestGke.ARGUMENTS, f"--env={name}=x", "--", *FLAGS)
        assert done.returncode == 2
        assert f"--env={name}=x must be NAME=VALUE" in done.stderr

    def keep(self, folder, gcloud):
        return self.act("keep", folder, gcloud)

    def act(self, action, folder, gcloud):
        """Runs an action with a stand-in for gcloud; returns it and the calls of gcloud."""
        stub = folder / "bin" / "gcloud"
        stub.parent.mkdir()
        stub.write_text(f"""#!/usr/bin/env bash
echo "$*" >> calls
created=$(grep -c 'queued-resources create' calls)
deleted=$(grep -c 'queued-resources delete' calls)
{gcloud}
exit 0
""")
        stub.chmod(0o755)
        command = ["bash", ROOT / "launch" / "tpu_vm.sh", action, *self.ARGUMENTS]
        done = commands.run(
            [*command, "--poll_secs=0", "--", *FLAGS],
            cwd=folder,
            env=os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"},
        )
        return done, (folder / "calls").read_text()

    def test_the_workers_receive_the_checkout_without_what_runs_and_exports_left(self, tmp_path):
        sent = {"gin/runs/quickstart.gin", "docs/logs/a", "pyproject.toml", ".ci/run"}
        left = {"runs/a/summary.json", "exports/a", "logs/b/0.log", ".venv/bin/python", ".git/HEAD"}
        for name in sent | left:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        done, calls = self.act("install", tmp_path, "")
        assert done.returncode == 0, done.stderr
        assert "scp logs/conv.tar.gz conv:convt5.tar.gz" in calls
        with tarfile.open(tmp_path / "logs" / "conv.tar.gz") as archive:
            names = {name.removeprefix("./") for name in archive.getnames()}
        assert sent <= names
        assert not left & names

    @pytest.mark.parametrize("action", ["keep", "wait", "logs"])
    def test_without_gcloud_nothing_is_said_of_the_slice(self, tmp_path, action):
        command = [shutil.which("bash"), ROOT / "launch" / "tpu_vm.sh", action, *self.ARGUMENTS]
        env = os.environ | {"PATH": os.fspath(tmp_path)}
        done = commands.run([*command, "--", *FLAGS], cwd=tmp_path, env=env)
        assert done.returncode == 127
        assert "gcloud is not on the PATH; install" in done.stderr
        assert done.stderr.count("\n") == 1

    def test_a_run_that_fails_again_and_again_is_given_up(self, tmp_path):
        done, calls = self.keep(
            tmp_path,
            """
case "$*" in
  *'queued-resources describe'*) ((created > deleted)) && echo ACTIVE ;;
  *'cat convt5/exit_code'*) echo 1 ;;
esac""",
        )
        assert done.returncode == 1
        assert "the third failure in a row; see logs/conv" in done.stderr
        assert calls.count("queued-resources create") == 3
        assert calls.count("queued-resources delete") == 3

    def test_a_run_that_the_cloud_makes_save_is_continued_however_often(self, tmp_path):
        done, calls = self.keep(
            tmp_path,
            """
case "$*" in
  *'queued-resources describe'*) ((created > deleted)) && echo ACTIVE ;;
  *'cat convt5/exit_code'*) ((created == 5)) && echo 0 || echo 143 ;;
esac""",
        )
        assert done.returncode == 0, done.stderr
        assert calls.count("convt5.train --multi_host") == 5

    def test_a_run_that_someone_stopped_is_not_continued(self, tmp_path):
        done, calls = self.keep(
            tmp_path,
            """
case "$*" in
  *'queued-resources describe'*) ((created > deleted)) && echo ACTIVE ;;
  *'cat convt5/exit_code'*) echo 130 ;;
esac""",
        )
        assert done.returncode == 130
        assert calls.count("convt5.train --multi_host") == 1
        assert calls.count("queued-resources delete") == 1

    def test_a_preempted_slice_is_asked_for_again_and_the_run_continued(self, tmp_path):
        # The first slice is gone at the second look; training ends on the second slice.
        done, calls = self.keep(
            tmp_path,
            """
case "$*" in
  *'queued-resources describe'*)
    if ((created == 0 || created == deleted)); then exit 1; fi
    if ((created == 1)) && grep -q convt5.train calls; then echo SUSPENDED; else echo ACTIVE; fi ;;
  *'cat convt5/exit_code'*) ((created == 2)) && echo 0 ;;
esac""",
        )
        assert done.returncode == 0, done.stderr
        assert "the slice is gone" in done.stderr
        assert calls.count("queued-resources create") == 2
        assert calls.count("convt5.train --multi_host") == 2
        assert calls.count("queued-resources delete") == 2
        assert calls.count("--output-directory=logs/conv") == 2

    def test_a_call_that_fails_does_not_give_a_healthy_slice_back(self, tmp_path):
        # Two looks at a slice that trains fail; after the next, training ends.
        done, calls = self.keep(
            tmp_path,
            """
looks=$(grep -c 'queued-resources describe' calls)
case "$*" in
  *'queued-resources describe'*)
    if ((created == 0)); then echo 'ERROR: NOT_FOUND: no such request' >&2; exit 1; fi
    if ((looks == 4 || looks == 5)); then echo 'ERROR: connection reset' >&2; exit 1; fi
    echo ACTIVE ;;
  *'cat convt5/exit_code'*) ((looks > 6)) && echo 0 ;;
esac""",
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("gcloud does not say how conv is: ERROR: connection reset") == 2
        assert calls.count("queued-resources create") == 1
        assert calls.count("queued-resources delete") == 1

    def test_a_slice_that_is_not_found_any_more_is_gone(self, tmp_path):
        done, calls = self.keep(
            tmp_path,
            """
case "$*" in
  *'queued-resources describe'*)
    if ((created == deleted)) || { ((created == 1)) && grep -q convt5.train calls; }; then
      echo "ERROR: (gcloud) Resource 'conv' was not found" >&2
      exit 1
    fi
    echo ACTIVE ;;
  *'cat convt5/exit_code'*) ((created == 2)) && echo 0 ;;
esac""",
        )
        assert done.returncode == 0, done.stderr
        assert "the slice is gone" in done.stderr
        assert calls.count("queued-resources create") == 2

    @pytest.mark.parametrize("step", ["queued-resources create", "tpu-vm scp", "-m uv sync"])
    def test_a_step_that_fails_three_times_in_a_row_ends_it(self, tmp_path, step):
        done, calls = self.keep(
            tmp_path,
            f"""
case "$*" in
  *'{step}'*) echo 'ERROR: refused' >&2; exit 1 ;;
  *'queued-resources describe'*)
    if ((created == deleted)); then echo 'ERROR: NOT_FOUND' >&2; exit 1; fi
    echo ACTIVE ;;
esac""",
        )
        assert done.returncode == 1
        assert "the third failure in a row" in done.stderr
        assert calls.count(step) == 3
        assert "convt5.train" not in calls

    @pytest.mark.parametrize("answer", ["exit 1", "echo FAILED"])
    def test_a_request_of_which_nothing_is_known_or_that_failed_is_given_up(self, tmp_path, answer):
        done, calls = self.keep(
            tmp_path,
            f"""
case "$*" in
  *'queued-resources describe'*)
    if ((created == deleted)); then echo 'ERROR: NOT_FOUND' >&2; exit 1; fi
    {answer} ;;
esac""",
        )
        assert done.returncode == 1
        assert calls.count("queued-resources create") == 3
        assert "tpu-vm scp" not in calls

    @pytest.mark.parametrize(
        "arguments",
        [("keep",), ("run", "n", "z"), ("start", "n", "z"), ("create", "n", "z", "--fast")],
    )
    def test_a_wrong_call_is_a_usage_error(self, arguments):
        done = call("tpu_vm.sh", "--dry_run", *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: ")


class TestSlurm:
    def test_a_dry_run_shows_the_commands_of_submission_and_job(self):
        text = shown("slurm.sh", "--dry_run", "--nodes=4", "--gpus_per_node=8", "--partition=a")
        assert "sbatch --job-name=convt5 --nodes=4 " in text
        assert "--ntasks-per-node=8 --gpus-per-node=8 --partition=a launch/slurm_job.sh" in text
        assert "srun --label --kill-on-bad-exit=1 .venv/bin/python -m convt5.train" in text
        assert text.count(QUOTED) == 2

    def test_a_job_without_gpus_has_all_cpus_of_its_nodes(self):
        text = shown("slurm.sh", "--dry_run", "--nodes=4", "--gpus_per_node=0")
        assert "--ntasks-per-node=1 --exclusive launch/slurm_job.sh" in text
        assert "--gpus" not in text

    @pytest.mark.parametrize(
        "flag", ["--nodes=0", "--nodes=two", "--gpus_per_node=-1", "--save_secs=1m"]
    )
    def test_what_slurm_would_refuse_is_a_usage_error(self, flag):
        command = ["--dry_run", "--nodes=4", "--gpus_per_node=8", flag, "--", *FLAGS]
        done = call("slurm.sh", *command)
        assert done.returncode == 2
        assert f"{flag} must be an integer" in done.stderr

    def job(self, folder, srun, *, squeue="echo 'RUNNING   None   N/A   '"):
        """Runs a job with stand-ins for SLURM; returns its exit code and what was requeued."""
        programs = {"srun": srun, "scontrol": 'echo "$@" > requeued', "squeue": squeue}
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        done = commands.run(
            ["bash", ROOT / "launch" / "slurm_job.sh", *FLAGS],
            cwd=folder,
            env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"},
        )
        requeued = folder / "requeued"
        return done.returncode, requeued.read_text() if requeued.exists() else None

    @pytest.mark.parametrize(("code", "requeued"), [(143, "requeue 17\n"), (0, None), (1, None)])
    def test_a_job_that_was_asked_to_save_is_queued_again(self, tmp_path, code, requeued):
        assert self.job(tmp_path, f"exit {code}") == (code, requeued)

    @pytest.mark.parametrize(
        ("answer", "requeued"),
        [
            ("COMPLETING          None                N/A", None),
            ("CANCELLED           None                N/A", None),
            ("COMPLETING          TimeLimit           N/A", "requeue 17\n"),
            ("COMPLETING          None                2026-01-02T03:04:05", "requeue 17\n"),
            ("", "requeue 17\n"),
        ],
    )
    def test_a_job_that_someone_cancelled_is_not_queued_again(self, tmp_path, answer, requeued):
        squeue = f"echo '{answer}'\nexit {int(not answer)}"
        assert self.job(tmp_path, "exit 143", squeue=squeue) == (143, requeued)

    @pytest.mark.parametrize(("code", "requeued"), [(143, "requeue 17\n"), (0, None)])
    def test_a_job_asked_to_end_when_training_ends_has_the_code_of_training(
        self, tmp_path, code, requeued
    ):
        for _ in range(5):  # The two come in either order.
            found = self.job(tmp_path, f"sleep 0.1; kill -TERM $PPID; exit {code}")
            assert found == (code, requeued)


class TestGke:
    ARGUMENTS = ("--project=p", "--zone=z", "--slice=v5e:4x4")

    def manifest(self, *arguments):
        return json.loads(shown("gke.py", "manifest", *self.ARGUMENTS, *arguments))

    def test_a_dry_run_shows_every_command_in_order(self):
        actions = ("cluster", "image", "run", "logs", "stop", "delete")
        text = shown("gke.py", "--dry_run", *actions, *self.ARGUMENTS, "--spot")
        starts = [
            "gcloud container clusters create",
            "gcloud container node-pools create",
            "gcloud container clusters get-credentials",
            "kubectl apply --server-side",
            "gcloud builds submit",
            "kubectl apply -f -",
            "kubectl logs",
            "kubectl delete jobset",
            "gcloud container clusters delete",
        ]
        found = [line for line in text.splitlines() if line.startswith(("gcloud", "kubectl"))]
        assert len(found) == len(starts)
        for line, start in zip(found, starts, strict=True):
            assert line.startswith(start)
        assert "--tpu-topology=4x4" in found[1]
        assert found[1].endswith("--num-nodes=4 --tpu-topology=4x4 --scopes=cloud-platform --spot")

    @pytest.mark.parametrize(
        "slice_name",
        quick(["v5e:2x2", "v5e:4x4", "v5p:4x4x4", "v6e:8x8"], chosen=["v5e:2x2", "v5p:4x4x4"]),
    )
    def test_the_manifest_has_the_form_of_a_jobset(self, slice_name):
        jsonschema = pytest.importorskip("jsonschema")
        found = self.manifest(f"--slice={slice_name}", "--env=TFDS_DATA_DIR=gs://bucket/tfds")
        jsonschema.Draft202012Validator.check_schema(jobset_schema.JOBSET)
        jsonschema.validate(found, jobset_schema.JOBSET)
        (jobs,) = found["spec"]["replicatedJobs"]
        chips = 1
        for size in slice_name.partition(":")[2].split("x"):
            chips *= int(size)
        spec = jobs["template"]["spec"]
        container = spec["template"]["spec"]["containers"][0]
        limit = int(container["resources"]["limits"]["google.com/tpu"])
        assert spec["parallelism"] * limit == spec["completions"] * limit == chips
        assert container["command"][-2:] == FLAGS

    def test_kubernetes_is_asked_to_expand_nothing(self):
        texts = ["--gin.A=$(HOME)", "--gin.B=$$", "--gin.C='a$b'"]
        done = call("gke.py", "manifest", *self.ARGUMENTS, "--env=D=$(A)$", "--", *texts)
        (jobs,) = json.loads(done.stdout)["spec"]["replicatedJobs"]
        container = jobs["template"]["spec"]["template"]["spec"]["containers"][0]
        # Kubernetes makes $ of $$, and looks for a variable behind any other $.
        assert container["command"][-3:] == [text.replace("$", "$$") for text in texts]
        assert {"name": "D", "value": "$$(A)$$"} in container["env"]

    def test_the_schema_refuses_what_the_server_would(self):
        jsonschema = pytest.importorskip("jsonschema")
        for path, value in (
            (("metadata", "name"), "My_Run"),
            (("spec", "failurePolicy", "maxRestart"), 3),
            (("spec", "replicatedJobs", 0, "template", "spec", "parallelism"), "4"),
        ):
            broken = copy.deepcopy(self.manifest())
            *folders, last = path
            inner = broken
            for name in folders:
                inner = inner[name]
            inner[last] = value
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(broken, jobset_schema.JOBSET)

    @pytest.mark.parametrize(
        ("flag", "rule"),
        [
            ("--name=My_Run", "small letters"),
            ("--name=" + "n" * 41, "at most 40"),
            ("--name=run-", "no hyphen last"),
            ("--restarts=-1", "at least 0"),
        ],
    )
    def test_what_the_server_would_refuse_is_a_usage_error(self, flag, rule):
        done = call("gke.py", "manifest", flag, *self.ARGUMENTS, "--", *FLAGS)
        assert done.returncode == 2
        assert flag in done.stderr
        assert rule in done.stderr

    def test_an_absent_program_is_told_in_one_line(self, tmp_path):
        env = os.environ | {"PATH": os.fspath(tmp_path)}
        done = call("gke.py", "stop", *self.ARGUMENTS, env=env)
        assert done.returncode == 127
        assert done.stderr.startswith("gke: kubectl is not on the PATH; install it")
        assert done.stderr.count("\n") == 1

    def test_ctrl_c_while_logs_are_followed_leaves_no_traceback(self, tmp_path):
        (tmp_path / "kubectl").write_text("#!/bin/sh\nkill -INT $PPID\nexec sleep 1\n")
        (tmp_path / "kubectl").chmod(0o755)
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = call("gke.py", "logs", *self.ARGUMENTS, env=env)
        assert (done.returncode, done.stderr) == (130, "")

    def test_a_reader_that_has_enough_ends_it_without_a_traceback(self):
        command = [
            sys.executable,
            str(ROOT / "launch" / "gke.py"),
            "manifest",
            *self.ARGUMENTS,
            "--",
            *FLAGS,
        ]
        read, write = os.pipe()
        os.close(read)
        done = commands.run(command, stdout=write)
        os.close(write)
        assert done.stderr == ""

    @pytest.mark.parametrize("slice_name", ["v5e", "v9:2x2", "v5e:1x1", "v5e:0x4", "v5e:twoxtwo"])
    def test_a_slice_that_does_not_exist_is_a_usage_error(self, slice_name):
        arguments = ("--project=p", "--zone=z", f"--slice={slice_name}")
        done = call("gke.py", "manifest", *arguments, "--", *FLAGS)
        assert done.returncode == 2
        assert "--slice=" in done.stderr
