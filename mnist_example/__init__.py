"""Train on handwritten digits with virtual IPUs, with the classifier on one IPU or sharded over all IPUs."""
