"""One weight update, the batches that it reads, and the files that hold its results."""
