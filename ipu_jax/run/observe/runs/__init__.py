"""Log what happens in a run, and make a page about it."""
