"""Save the state of a training to disk while it goes on, and resume from it, also on other IPUs."""
