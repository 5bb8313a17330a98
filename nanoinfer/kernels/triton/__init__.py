"""Kernels in Triton, one file a subject. Importing this room needs triton; only it and attention/triton.py may do so.

Every kernel is reached through a torch operator `nanoinfer::name` with a fake implementation, so that a whole step runs
under FakeTensorMode. With TRITON_INTERPRET=1 (read when triton is imported) all of them run on CPU tensors.
"""
