"""A whole run in simulated time: the very manager and accounts of the runtime, and a model of everything else."""
