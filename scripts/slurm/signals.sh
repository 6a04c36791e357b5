# shellcheck shell=bash
# Sourced by the batch files. Slurm tells the batch script that time runs out (--signal=B:USR1@300), and most clusters
# that a job is preempted (TERM); the script tells the ranks, which save and leave with exit code 75, and puts the job
# into the queue again, where the same command continues. Every other exit code is the job's own.

readonly preempted=75

# Whether Slurm is ending the job itself: somebody cancelled it, and what it has saved stays and it stays away, or a
# preemption puts it back into the queue anyway. While the script still runs, scontrol calls both COMPLETING.
is_ending() {
  local job
  job="$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null || true)"
  [[ "$job" == *JobState=CANCELLED* || "$job" == *JobState=COMPLETING* ]]
}

# run_until_told_to_stop COMMAND...: does not return.
run_until_told_to_stop() {
  local step='' told='' status=0
  trap 'told=1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null || true' USR1 TERM
  "$@" &
  step=$!
  [ -z "$told" ] || kill -USR1 "$step" 2>/dev/null || true
  # A signal to the shell ends the wait, not the command.
  while :; do
    status=0
    wait "$step" || status=$?
    if [ "$status" -le 128 ] || ! kill -0 "$step" 2>/dev/null; then break; fi
  done
  trap - USR1 TERM
  if [ "$status" -eq "$preempted" ] && ! is_ending; then
    echo "fp4train was stopped and has saved; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID" || echo "scontrol did not: the job may be in the queue, or may not be requeued"
  fi
  exit "$status"
}
