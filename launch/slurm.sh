#!/usr/bin/env bash
# Submits a training run to SLURM: one process per device, on any number of nodes. The job saves and
# requeues itself before its time limit and when it is preempted.
#
#   launch/slurm.sh [--dry_run] --nodes=N --gpus_per_node=M [OPTIONS] [-- FLAGS_OF_CONVT5_TRAIN...]
#
#   --partition=P      SLURM partition
#   --time=T           time limit of one job (default: 24:00:00)
#   --name=NAME        name of the job (default: convt5)
#   --save_secs=S      seconds before the time limit at which the job must save (default: 120)
#   --gpus_per_node=0  one process per node, on all of its CPUs
#
# Other options of sbatch can be set as variables, such as SBATCH_ACCOUNT=A, and for more than one
# CPU per GPU, where the partition gives no more, SBATCH_CPUS_PER_GPU=8.
#
# `scancel JOB` ends a job for good: it saves, if that takes less than SLURM's KillWait.
#
# Example:
#   launch/slurm.sh --nodes=4 --gpus_per_node=8 -- --gin_file=gin/runs/pretrain_c4.gin \
#     --gin_file=gin/models/dynamic_base.gin --gin.RUN_DIR=/shared/runs/dynamic_base
#
# The working directory must be this checkout, installed (uv sync --extra gpu), and the run directory
# one that all nodes see. The output of all processes goes to logs/NAME_JOB.log. --dry_run prints the
# commands of submission and of the job. See docs/launch.md.
set -euo pipefail

usage() {
  echo "usage: launch/slurm.sh [--dry_run] --nodes=N --gpus_per_node=M [OPTIONS] [-- FLAGS...]; see" \
    "the head of the file. $1" >&2
  exit 2
}

dry_run='' nodes='' gpus='' partition='' time=24:00:00 name=convt5 save_secs=120
while (($#)); do
  case $1 in
    -h | --help)
      sed -n '2,/^set -/{s/^# \{0,1\}//;/^set -/d;p}' "$0"
      exit 0
      ;;
    --dry_run) dry_run=1 ;;
    --nodes=*) nodes=${1#*=} ;;
    --gpus_per_node=*) gpus=${1#*=} ;;
    --partition=*) partition=${1#*=} ;;
    --time=*) time=${1#*=} ;;
    --name=*) name=${1#*=} ;;
    --save_secs=*) save_secs=${1#*=} ;;
    --)
      shift
      break
      ;;
    *) usage "unknown option $1." ;;
  esac
  shift
done
[[ -n $nodes && -n $gpus ]] || usage "--nodes and --gpus_per_node are needed."
[[ $nodes =~ ^[1-9][0-9]*$ ]] || usage "--nodes=$nodes must be an integer of at least 1."
[[ $gpus =~ ^(0|[1-9][0-9]*)$ ]] || usage "--gpus_per_node=$gpus must be an integer of at least 0."
[[ $save_secs =~ ^[1-9][0-9]*$ ]] || usage "--save_secs=$save_secs must be an integer of at least 1."
(($#)) || usage "flags of convt5.train are needed after --."

submission=(
  sbatch --job-name="$name" --nodes="$nodes" --time="$time" --requeue --open-mode=append
  --output="logs/${name}_%j.log" --signal="TERM@$save_secs"
  --ntasks-per-node="$((gpus > 0 ? gpus : 1))"
)
# Without --exclusive, a job has one CPU for each of its processes.
if ((gpus > 0)); then submission+=(--gpus-per-node="$gpus"); else submission+=(--exclusive); fi
[[ -z $partition ]] || submission+=(--partition="$partition")
submission+=(launch/slurm_job.sh "$@")

if [[ -n $dry_run ]]; then
  echo mkdir -p logs
  printf '%q ' "${submission[@]}"
  echo
  CONVT5_DRY_RUN=1 bash launch/slurm_job.sh "$@"
else
  mkdir -p logs
  "${submission[@]}"
fi
