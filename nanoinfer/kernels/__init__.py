"""Tensors in, tensors out. Every fast kernel has its plain torch twin in `reference.py`."""
