#!/usr/bin/env bash
# What launch/slurm.sh submits: runs on the first node of a job, and starts all of its processes.
set -uo pipefail

# One process that fails ends the others, which would wait for it. SLURM asks the processes to save
# (SIGTERM) before the time is over; JAX finds nodes and processes in SLURM's variables.
training=(
  srun --label --kill-on-bad-exit=1 .venv/bin/python -m convt5.train --multi_host "$@"
)
requeue=(scontrol requeue "${SLURM_JOB_ID:-JOB}")
if [[ -n "${CONVT5_DRY_RUN:-}" ]]; then
  printf '%q ' "${training[@]}"
  printf '\nif it ends with 143 (saved, as asked) and nobody cancelled the job: '
  printf '%q ' "${requeue[@]}"
  echo
  exit 0
fi

# Whether someone cancelled the job (scancel), which asks the processes to save too. A job is also
# completing where it is out of time or preempted; where SLURM does not answer, it is queued again.
is_cancelled() {
  local state reason preempted
  read -r state reason preempted < <(
    squeue --noheader --jobs="$SLURM_JOB_ID" --Format=State,Reason,PreemptTime
  )
  [[ $state == CANCELLED || "$state $reason $preempted" == 'COMPLETING None N/A' ]]
}

# Asked to end, this script still has to requeue the job: it waits for the training all the same, and
# has its exit code, which `wait` of one in the background would not when both end at once.
trap : TERM
code=0
"${training[@]}" || code=$?
if ((code == 143)) && ! is_cancelled; then
  "${requeue[@]}"
fi
exit "$code"
