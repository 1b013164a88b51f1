"""One thread for every process of the tests: their tensors are small, threads would wait for cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
