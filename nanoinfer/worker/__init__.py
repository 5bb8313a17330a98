"""One rank's part of a step: rows of sequences to tensors, tensors to tokens."""
