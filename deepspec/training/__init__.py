"""Training: one loop over every algorithm, its checkpoints, meters, learning rate and process start-up."""
