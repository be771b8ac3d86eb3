"""Sets jax up for every test and doctest: 8 virtual IPUs on the CPU, and no test that hangs in a collective.

It stands at the top, not in tests/, because the doctests of the packages need it as well. It runs before anything
starts a jax backend, which is when these settings count; processes that a test starts inherit them.
"""

import os

# When the IPUs of a collective don't all come, XLA waits for a minute or for ever. Here it says so after 20 s and ends
# after 40 s. A quiet machine does with a tenth of that; but 8 virtual IPUs and several test workers on 2 cores keep an
# honest collective waiting for seconds, and an abort ends the whole test worker.
_COLLECTIVES_FAIL_FAST = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20 --xla_cpu_collective_call_terminate_timeout_seconds=40"
)

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COLLECTIVES_FAIL_FAST}".strip()
# A cached executable would hide what a test compiles.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
