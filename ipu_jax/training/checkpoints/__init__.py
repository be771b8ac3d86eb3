"""Save the state of a training run to disk while it runs, and resume from it, also on other IPUs."""
