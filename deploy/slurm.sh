#!/bin/bash
# One replica as a Slurm job that may be preempted and requeued at any time: each start goes on where the last
# one stopped. Copy this file next to the files of `isthmus init` or `isthmus invite`, and submit it there:
#
#   sbatch slurm.sh rack-0.isthmus.toml
#   sbatch --array=0-2%2 slurm.sh rack-0.isthmus.toml rack-1.isthmus.toml rack-2.isthmus.toml    two at a time
#   sbatch --nodes=2 slurm.sh edge-0.isthmus.toml              a pipelined replica of two stages, one on each node
#
# The folder must be on a file system that all nodes see: private state goes to work/ below it. sbatch passes on
# the environment, so set the bucket's credentials there; where your site turns that off, source a file below.
# Add what your site needs (a partition, an account) here or on sbatch's command line.
#SBATCH --job-name=isthmus
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --ntasks-per-node=1
##SBATCH --time=4:00:00
##SBATCH --gres=gpu:1
##SBATCH --cpus-per-task=8
##SBATCH --mem=32G

# module load cuda
# . ~/bucket.env
isthmus=${ISTHMUS:-isthmus}  # such as ~/isthmus/bin/isthmus
options=${ISTHMUS_JOIN:-}    # more options of `isthmus join`, such as "--device cuda --threads 8"

at=$((${SLURM_ARRAY_TASK_ID:-0} + 1))
file=${!at}
if [ -z "$file" ]; then
    echo "slurm.sh: no file for task ${SLURM_ARRAY_TASK_ID:-0}; sbatch slurm.sh NAME.isthmus.toml" >&2
    exit 2
fi
state=$PWD/work/$(basename "$file" .isthmus.toml)
grace=110  # ten seconds less than --signal, for Slurm to deliver it and for this shell to end

# Where Slurm itself ends the job (a requeue, scancel), this shell gets SIGTERM too. It waits for the step, which
# saves and ends by itself.
ended=
trap 'ended=yes' TERM
nodes=${SLURM_JOB_NUM_NODES:-1}
if [ "$nodes" -gt 1 ]; then
    # Each task of the step is the stage of its number; they find each other through the bucket.
    srun --nodes="$nodes" --ntasks="$nodes" --kill-on-bad-exit=0 bash -c \
        'state=$1; shift; exec "$@" --stage "$SLURM_PROCID" --work "$state/stage-$SLURM_PROCID"' stage \
        "$state" $isthmus join "$file" --grace $grace $options
else
    srun --nodes=1 --ntasks=1 $isthmus join "$file" --grace $grace --work "$state" $options
fi
status=$?
# 75: left before the run was finished. Slurm requeues what it has ended; after the time limit only we can.
if [ "$status" -eq 75 ] && [ -z "$ended" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
