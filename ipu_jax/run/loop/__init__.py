"""Run a whole training: the loop around `TrainStep`, its progress, and its results."""
