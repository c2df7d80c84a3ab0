"""What a training run will need, before anything is loaded: memory, disk, arithmetic, hours."""
