"""Train to the end: the loop around `TrainStep`, its progress, and its results."""
