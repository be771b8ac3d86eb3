"""Handwritten digits on virtual IPUs: an MLP on one of them, its classifier on another or, sharded, on all of them."""
