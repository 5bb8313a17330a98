"""C++ kernels for the CPU, compiled at first use. `build.py` makes the library, `ops.py` calls it with tensors."""
