"""Keep what happens in a run, and make a page of it."""
