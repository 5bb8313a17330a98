"""What runs next: sequences, blocks, the scheduler, and text in and out. Pure Python; loads no torch."""
