"""What owns CUDA objects: partitions, memory, modules, graphs; and how faults become exceptions."""
