"""Where a step runs: in this process, or in one process per rank. Loading this room loads no torch."""
