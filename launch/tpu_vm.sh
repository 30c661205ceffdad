#!/usr/bin/env bash
# Trains on a Cloud TPU slice of any size: requests the slice, starts every worker, collects the logs,
# and resumes after a preemption.
#
#   launch/tpu_vm.sh [--dry_run] ACTION NAME ZONE [OPTIONS] [-- FLAGS_OF_CONVT5_TRAIN...]
#
#   keep     creates, installs, starts and waits, again after each preemption, until training ends
#   create   requests the slice (a queued resource) and waits until it is active
#   install  copies this checkout to all workers and installs it
#   start    starts training on all workers; training continues when this connection ends
#   wait     waits until training or the slice ends; exit code 3: the slice is gone, 1: training ended
#            without an exit code, for example because its worker rebooted
#   logs     copies the output of all workers to logs/NAME/WORKER.log
#   stop     asks all workers to save at the next step and stop; also ends keep
#   delete   deletes the slice
#
#   --accelerator_type=T  TPU type, such as v5litepod-16
#   --runtime_version=V   software version of the workers (default: depends on the type)
#   --spot                preemptible, at a lower price
#   --env=NAME=VALUE      environment variable of training; may be repeated
#   --poll_secs=N         seconds between checks (default: 60)
#
# Example:
#   launch/tpu_vm.sh keep conv us-west4-a --accelerator_type=v5litepod-16 --spot -- \
#     --gin_file=gin/runs/pretrain_c4.gin --gin_file=gin/models/dynamic_base.gin \
#     --gin.RUN_DIR=gs://bucket/dynamic_base
#
# Needs gcloud, logged in, and this checkout as the working directory. --dry_run prints every command
# and runs none. docs/launch.md is a walk-through.
set -euo pipefail

usage() {
  echo "usage: launch/tpu_vm.sh [--dry_run] ACTION NAME ZONE [OPTIONS] [-- FLAGS...]; see the head" \
    "of the file. $1" >&2
  exit 2
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,/^set -/{s/^# \{0,1\}//;/^set -/d;p}' "$0"
  exit 0
fi
dry_run=
if [[ "${1:-}" == --dry_run ]]; then
  dry_run=1
  shift
fi
(($# >= 3)) || usage "ACTION, NAME and ZONE are needed."
action=$1 name=$2 zone=$3
shift 3
accelerator_type='' runtime_version='' spot='' poll_secs=60 variables='' silent_rounds=10
while (($#)); do
  case $1 in
    --accelerator_type=*) accelerator_type=${1#*=} ;;
    --runtime_version=*) runtime_version=${1#*=} ;;
    --poll_secs=*) poll_secs=${1#*=} ;;
    --env=*)
      [[ ${1#*=} =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || usage "$1 must be --env=NAME=VALUE, where NAME \
has letters, digits and underscores and begins with no digit."
      variables+=$(printf '%q ' "${1#*=}")
      ;;
    --spot) spot=--spot ;;
    --)
      shift
      break
      ;;
    *) usage "unknown option $1." ;;
  esac
  shift
done
[[ $poll_secs =~ ^[0-9]+$ ]] || usage "--poll_secs=$poll_secs must be an integer of at least 0."
flags=$(printf ' %q' "$@")

say() { echo "tpu_vm: $*" >&2; }

[[ -n $dry_run ]] || command -v gcloud >/dev/null || {
  say "gcloud is not on the PATH; install the Google Cloud CLI, or show the commands with --dry_run."
  exit 127
}
gcloud_errors=$(mktemp)
trap 'rm -f "$gcloud_errors"' EXIT

# Runs a command, or prints it.
run() {
  if [[ -n $dry_run ]]; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

on_all_workers() {
  run gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1" "${@:2}"
}

suitable_runtime() {
  case $accelerator_type in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) echo tpu-ubuntu2204-base ;;
  esac
}

describe() {
  run gcloud compute tpus queued-resources describe "$name" --zone="$zone" \
    '--format=value(state.state)'
}

# Prints ACTIVE, WAITING_FOR_RESOURCES, ...; NOT_FOUND where the request does not exist; nothing
# where the call failed, which says nothing about the slice.
state() {
  local answer
  if answer=$(describe 2>"$gcloud_errors"); then
    echo "$answer"
  elif grep -qiE 'NOT_FOUND|not found' "$gcloud_errors"; then
    echo NOT_FOUND
  fi
}

# Prints the state, of three looks where calls fail; nothing where all of them did.
surely() {
  local now look
  for look in 1 2 3; do
    now=$(state)
    [[ -z $now ]] || break
    say "gcloud does not say how $name is ($look of 3): $(tail -n 1 "$gcloud_errors")"
    ((look == 3)) || sleep "$poll_secs"
  done
  echo "$now"
}

# Steps of what follows end with || return: set -e is off inside of what keep calls.
create() {
  [[ -n $accelerator_type ]] || usage "--accelerator_type is needed."
  local now=NOT_FOUND
  [[ -n $dry_run ]] || now=$(surely)
  if [[ -z $now || $now == NOT_FOUND ]]; then
    run gcloud compute tpus queued-resources create "$name" --node-id="$name" --zone="$zone" \
      --accelerator-type="$accelerator_type" \
      --runtime-version="${runtime_version:-$(suitable_runtime)}" ${spot:+"$spot"} || return
  fi
  if [[ -n $dry_run ]]; then
    describe
    return
  fi
  while now=$(surely) && [[ $now != ACTIVE ]]; do
    case $now in
      '' | NOT_FOUND | FAILED)
        say "$name is ${now:-unknown}"
        return 1
        ;;
      SUSPENDED | SUSPENDING)
        say "$name is $now"
        return 3
        ;;
    esac
    say "$name is $now; waiting"
    sleep "$poll_secs"
  done
}

# The checkout goes to all workers, so that uncommitted changes are what runs.
install() {
  run mkdir -p logs || return
  # --exclude=runs would leave gin/runs out too, and GNU's and macOS's tar anchor it differently.
  local GLOBIGNORE=.git:.venv:runs:exports:logs
  run tar -czf "logs/$name.tar.gz" -- * || return
  run gcloud compute tpus tpu-vm scp "logs/$name.tar.gz" "$name:convt5.tar.gz" \
    --zone="$zone" --worker=all || return
  on_all_workers "set -e
mkdir -p convt5 && tar -xzf convt5.tar.gz -C convt5 && cd convt5
python3 -m pip install --quiet --user uv && python3 -m uv sync --quiet --extra tpu"
}

# Fails where a worker could not begin. What runs there holds `lock`, whose end is noticed however it
# came: a process number may belong to another process after a reboot.
start() {
  (($#)) || usage "flags of convt5.train are needed after --."
  # A run that was saved because someone asked for it (stop) ends with 130, as after Ctrl-C: the
  # cloud did not interrupt it, and keep does not go on with it.
  on_all_workers "cd convt5 && exec 9>> lock || exit
flock -n 9 || { echo 'training runs here already; stop it first' >&2; exit 1; }
[ -x .venv/bin/python ] || { echo 'convt5 is not installed here; install it first' >&2; exit 1; }
rm -f exit_code stopped pid
env ${variables}nohup setsid bash -c \
'.venv/bin/python -m convt5.train --multi_host \"\$@\" & echo \$! > pid; wait \$!; code=\$?; \
((code != 143)) || [[ ! -e stopped ]] || code=130; echo \$code > exit_code' \
train$flags >> train.log 2>&1 < /dev/null &
for _ in \$(seq 100); do [ ! -s pid ] || break; sleep 0.1; done
[ -s pid ] || { echo 'training did not begin' >&2; exit 1; };"
}

# How the training of the first worker is: its exit code, running, or vanished: no process has the
# lock, and none left an exit code. Fails where the worker does not answer.
look() {
  run gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=0 \
    --ssh-flag=-oConnectTimeout=30 --ssh-flag=-oServerAliveInterval=30 \
    --command='if [ -s convt5/exit_code ]; then cat convt5/exit_code
elif [ -e convt5/lock ] && ! flock -n convt5/lock true; then echo running
else echo vanished; fi'
}

wait_for_end() {
  if [[ -n $dry_run ]]; then
    describe
    look
    return
  fi
  local found now vanished=0 silent=0
  # A call that fails (no network, a login that expired) is no reason to give the slice back.
  while now=$(state) && [[ -z $now || $now == ACTIVE ]]; do
    if [[ -z $now ]]; then
      say "gcloud does not say how $name is: $(tail -n 1 "$gcloud_errors")"
    elif found=$(look 2>"$gcloud_errors"); then
      silent=0
      case $found in
        # It may have ended between the two questions, so that one answer does not count.
        vanished)
          vanished=$((vanished + 1))
          say "no training runs on worker 0 of $name, and it left no exit code ($vanished of 2)"
          ((vanished < 2)) || return 1
          ;;
        '' | *[!0-9]*) vanished=0 ;;
        *)
          say "training ended with exit code $found"
          return "$found"
          ;;
      esac
    else
      silent=$((silent + 1))
      say "worker 0 of $name does not answer ($silent of $silent_rounds):" \
        "$(tail -n 1 "$gcloud_errors")"
      ((silent < silent_rounds)) || return 1
    fi
    sleep "$poll_secs"
  done
  say "the slice is gone (preempted, or deleted)"
  return 3
}

# Whether training runs, as where keep is given again after its own machine was switched off.
is_training() {
  [[ -z $dry_run && $(look 2>/dev/null) == running ]] || return
  say "training runs on $name already; waiting for it"
}

logs() {
  run mkdir -p "logs/$name" || return
  on_all_workers 'cat convt5/train.log' --output-directory="logs/$name"
}

stop() {
  on_all_workers "cd convt5 || exit
! flock -n lock true || { echo 'no training runs here' >&2; exit 1; }
touch stopped && xargs kill -TERM < pid"
}

delete() {
  run gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force --quiet
}

keep() {
  (($#)) || usage "flags of convt5.train are needed after --."
  local code failures=0
  while true; do
    code=0
    { create && { is_training || { install && start "$@"; }; } && wait_for_end; } || code=$?
    # Where the slice is gone so is its log; the run directory has all that matters.
    logs || true
    delete || true
    case $code in
      0) return 0 ;;
      2) return 2 ;; # A wrong setting: trying again would not help.
      130) return 130 ;; # Someone stopped it.
      3 | 143) failures=0 ;; # Preempted, and perhaps saved before the slice was gone.
      *) failures=$((failures + 1)) ;;
    esac
    if ((failures == 3)); then
      say "exit code $code, the third failure in a row; see logs/$name"
      return "$code"
    fi
    say "exit code $code; asking for another slice, on which the run continues"
    sleep "$poll_secs"
  done
}

case $action in
  create | install | logs | stop | delete) "$action" ;;
  start | keep) "$action" "$@" ;;
  wait) wait_for_end ;;
  *) usage "unknown action $action." ;;
esac
