"""What the machine has: cores, memory nodes, memory, GPUs."""
