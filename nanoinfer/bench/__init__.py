"""The benchmarks behind `bench.py`: workloads, the machine's ceilings, and the floor that they set for a run."""
