"""The server process that forks the workers (`runtime.workers`); nothing else imports this.

It ends when its supervisor does. A scheduler may send SIGTERM to every process of a job; only the supervisor
reacts to it.
"""

import os
import signal

from isthmus.runtime.process import die_with_parent

die_with_parent(os.getppid())
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# Code that asks torch for CUDA during import must not start the driver: no forked process could use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
