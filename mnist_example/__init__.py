"""Train on handwritten digits with virtual IPUs: an MLP on one IPU, its classifier on another or sharded over all."""
