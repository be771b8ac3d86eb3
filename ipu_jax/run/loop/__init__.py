"""Run a whole training run: the loop around `TrainStep`, its progress, and its results."""
