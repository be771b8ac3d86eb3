"""Run a whole training: the loop around `TrainStep`, its progress, and what it leaves behind."""
