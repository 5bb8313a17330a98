"""Offline throughput, next to the floor that this machine sets for the very steps that ran. Run `bench.py --help`."""

from nanoinfer.bench.throughput import main

if __name__ == "__main__":
    main()
