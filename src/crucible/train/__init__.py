"""Training: from token shards to checkpoints. `loop.train` is the whole of it as one function."""

import os

# Between two parallel loops torch's OpenMP threads wait in a busy loop, which takes the cores from whoever has work:
# beside another process on two cores, a step of the nano preset took 1.0 to 2.7 s, and 0.2 to 0.7 s once they sleep.
# Read when torch is loaded, so it comes first here; it changes no result, and what the user has set stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
