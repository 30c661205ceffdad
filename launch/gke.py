#!/usr/bin/env python3
"""Trains on TPU slices of Google Kubernetes Engine, as a JobSet that resumes after preemptions.

Prints or runs commands of `gcloud` and `kubectl`, and writes the manifest. Needs nothing but
Python's own library.
"""

import argparse
import json
import math
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

EXAMPLES = """\
actions:
  cluster   makes a cluster with a pool of TPU nodes, and installs JobSet in it
  image     builds this checkout as a container image
  run       starts the JobSet
  logs      follows the output of all pods
  stop      deletes the JobSet; each process saves first, and `run` goes on from there
  delete    deletes the cluster
  manifest  prints the JobSet

examples:
  # every command from an empty project to a run, none of them run
  python launch/gke.py --dry_run cluster image run --project=my-project --zone=us-west4-a \\
      --slice=v5e:4x4 --spot -- --gin_file=gin/runs/pretrain_c4.gin --gin.RUN_DIR=gs://bucket/run
"""

# Chips per host, the machine type of the host, and GKE's name of the chip.
_KINDS = {
    "v4": (4, "ct4p-hightpu-4t", "tpu-v4-podslice"),
    "v5e": (4, "ct5lp-hightpu-4t", "tpu-v5-lite-podslice"),
    "v5p": (4, "ct5p-hightpu-4t", "tpu-v5p-slice"),
    "v6e": (4, "ct6e-standard-4t", "tpu-v6e-slice"),
}
_JOBSET = "https://github.com/kubernetes-sigs/jobset/releases/download/v0.8.1/manifests.yaml"
# Time to finish a step and to write the arrays on the devices.
_GRACE_SECS = 120
_USAGE_ERROR = 2
_NAME = re.compile("[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")  # Rule for GKE clusters, the strictest.
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    flags, training = parse(argv)
    for action in flags.actions:
        if action == "manifest":
            print(json.dumps(manifest(flags, training), indent=2))
            continue
        for command, stdin in commands(action, flags, training):
            text = shlex.join(command)
            if flags.dry_run:
                print(text if stdin is None else f"{text} <<'END'\n{stdin}\nEND")
                continue
            try:
                code = subprocess.run(command, input=stdin, text=True, check=False).returncode
            except FileNotFoundError:
                print(
                    f"gke: {command[0]} is not on the PATH; install it, or show the commands with "
                    "--dry_run.",
                    file=sys.stderr,
                )
                return 127
            except KeyboardInterrupt:  # How one stops to follow the logs.
                return 130
            if code:
                print(f"gke: exit code {code} of: {text}", file=sys.stderr)
                return code
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns this program's flags, and those of `convt5.train`, which follow `--`."""
    parser = argparse.ArgumentParser(
        prog="python launch/gke.py",
        usage="%(prog)s [--dry_run] ACTION [ACTION ...] [flags] -- FLAGS_OF_CONVT5_TRAIN...",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = ("cluster", "image", "run", "logs", "stop", "delete", "manifest")
    parser.add_argument("actions", nargs="+", choices=actions, metavar="ACTION")
    parser.add_argument(
        "--name", default="convt5", help="name of cluster and JobSet (default: convt5)"
    )
    parser.add_argument("--project", required=True, help="of Google Cloud")
    parser.add_argument("--zone", required=True, help="zone that has these TPUs")
    parser.add_argument(
        "--slice", required=True, help="TPU generation and topology, such as v5e:4x4"
    )
    parser.add_argument("--spot", action="store_true", help="preemptible, at a lower price")
    parser.add_argument("--image", help="by default gcr.io/PROJECT/NAME")
    parser.add_argument(
        "--restarts", type=int, default=100, help="most restarts of the JobSet (default: 100)"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="of the training"
    )
    parser.add_argument("--dry_run", action="store_true", help="prints every command; runs none")
    own, training = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, training = own[:at], own[at + 1 :]
    flags = parser.parse_args(own)
    kind, _, topology = flags.slice.partition(":")
    if kind not in _KINDS or not all(size.isdigit() for size in topology.split("x")):
        parser.error(
            f"--slice={flags.slice} must be one of {', '.join(_KINDS)} and a topology, such as "
            "v5e:4x4"
        )
    chips, per_host = math.prod(map(int, topology.split("x"))), _KINDS[kind][0]
    if chips < 1 or chips % per_host:
        parser.error(f"--slice={flags.slice} has {chips} chips; give a multiple of {per_host}")
    if not _NAME.fullmatch(flags.name):
        parser.error(
            f"--name={flags.name} must be at most 40 small letters, digits and hyphens with a "
            "letter first and no hyphen last, as GKE asks"
        )
    if flags.restarts < 0:
        parser.error(f"--restarts={flags.restarts} must be at least 0")
    for text in flags.env:
        if not _VARIABLE.fullmatch(text):
            parser.error(
                f"--env={text} must be NAME=VALUE, where NAME has letters, digits and underscores "
                "and begins with no digit"
            )
    if not training and {"run", "manifest"} & set(flags.actions):
        parser.error("flags of convt5.train are needed after --")
    flags.kind, flags.topology = kind, topology
    flags.hosts = chips // per_host
    flags.image = flags.image or f"gcr.io/{flags.project}/{flags.name}"
    return flags, training


def commands(
    action: str, flags: argparse.Namespace, training: Sequence[str]
) -> list[tuple[list[str], str | None]]:
    """Returns the commands of an action, each with its standard input."""
    _, machine, _ = _KINDS[flags.kind]
    where = [f"--project={flags.project}", f"--zone={flags.zone}"]
    clusters = ["gcloud", "container", "clusters"]
    if action == "cluster":
        pool = [
            *("gcloud", "container", "node-pools", "create", f"{flags.name}-tpu"),
            *(f"--cluster={flags.name}", *where, f"--machine-type={machine}"),
            *(f"--num-nodes={flags.hosts}", f"--tpu-topology={flags.topology}"),
            "--scopes=cloud-platform",
            *(["--spot"] if flags.spot else []),
        ]
        return [
            ([*clusters, "create", flags.name, *where, "--num-nodes=1"], None),
            (pool, None),
            ([*clusters, "get-credentials", flags.name, *where], None),
            (["kubectl", "apply", "--server-side", "-f", _JOBSET], None),
        ]
    selector = f"--selector=jobset.sigs.k8s.io/jobset-name={flags.name}"
    text = json.dumps(manifest(flags, training), indent=2) if action == "run" else None
    return {
        "image": [
            (
                [
                    *("gcloud", "builds", "submit", f"--project={flags.project}"),
                    f"--config={_here('cloudbuild.json')}",
                    *(f"--substitutions=_IMAGE={flags.image}", "."),
                ],
                None,
            )
        ],
        "run": [(["kubectl", "apply", "-f", "-"], text)],
        "logs": [
            (["kubectl", "logs", "--follow", "--prefix", "--max-log-requests=1000", selector], None)
        ],
        "stop": [(["kubectl", "delete", "jobset", flags.name], None)],
        "delete": [([*clusters, "delete", flags.name, *where, "--quiet"], None)],
    }[action]


def manifest(flags: argparse.Namespace, training: Sequence[str]) -> dict[str, Any]:
    """Returns the JobSet: a pod for each host of the slice, restarted together."""
    chips, _, accelerator = _KINDS[flags.kind]
    container = {
        "name": "train",
        "image": flags.image,
        # No shell: the container's first process receives SIGTERM. GKE tells JAX which host this
        # is.
        "command": ["python", "-m", "convt5.train", "--multi_host", *map(_literal, training)],
        "env": [
            {"name": name, "value": _literal(value)}
            for name, _, value in (
                text.partition("=") for text in ["PYTHONUNBUFFERED=1", *flags.env]
            )
        ],
        "ports": [{"containerPort": 8471}, {"containerPort": 8476}],
        "resources": {
            "requests": {"google.com/tpu": str(chips)},
            "limits": {"google.com/tpu": str(chips)},
        },
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECS,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": accelerator,
            "cloud.google.com/gke-tpu-topology": flags.topology,
        },
        "containers": [container],
    }
    job = {
        "completionMode": "Indexed",
        "parallelism": flags.hosts,
        "completions": flags.hosts,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "train",
                        "operator": "In",
                        "values": [_USAGE_ERROR],
                    },
                }
            ]
        },
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": flags.name},
        "spec": {
            "failurePolicy": {
                "maxRestarts": flags.restarts,
                "rules": [
                    {
                        # A wrong setting: a retry would fail in the same way.
                        "name": "usage",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _literal(text: str) -> str:
    """Escapes text for Kubernetes, which expands $(VAR) in commands and values."""
    return text.replace("$", "$$")


def _here(name: str) -> str:
    return str(pathlib.PurePath("launch") / name)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Lets `| head` end it without a traceback.
    raise SystemExit(main(sys.argv[1:]))
