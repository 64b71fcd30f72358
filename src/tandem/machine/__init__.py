"""Hardware of the machine: cores, memory nodes, memory, GPUs."""
