"""The parts of gpu_check.py: each gives lines of its table, and is run by itself if it is asked for."""
