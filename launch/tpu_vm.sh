#!/usr/bin/env bash
# Trains on every worker of a Cloud TPU VM slice that exists; the same call continues a stopped run.
#
#   launch/tpu_vm.sh [--dry_run] TPU_NAME ZONE --gin_file=gin/runs/pretrain_c4.gin \
#       --gin_file=gin/models/dynamic_base.gin --gin.RUN_DIR=gs://bucket/dynamic_base
#
# Needs gcloud, logged in, and this checkout in the working directory. --dry_run prints the commands.
set -euo pipefail

run=()
if [[ "${1:-}" == --dry_run ]]; then
  run=(echo)
  shift
fi
if (($# < 3)); then
  echo "usage: launch/tpu_vm.sh [--dry_run] TPU_NAME ZONE FLAGS_OF_CONVT5_TRAIN..." >&2
  exit 2
fi
name=$1 zone=$2
shift 2
flags=$(printf ' %q' "$@")

# The checkout goes to all workers, so that uncommitted changes are what runs.
tarball=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$tarball"' EXIT
"${run[@]}" tar --exclude=.git --exclude=.venv --exclude=runs -czf "$tarball" .
"${run[@]}" gcloud compute tpus tpu-vm scp "$tarball" "$name:convt5.tar.gz" \
  --zone="$zone" --worker=all
"${run[@]}" gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="
  set -e; mkdir -p convt5 && tar -xzf convt5.tar.gz -C convt5 && cd convt5
  pip install --quiet uv && uv run --extra tpu python -m convt5.train --multi_host$flags"
