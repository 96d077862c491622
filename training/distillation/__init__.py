"""The parts of `training.distill`: batches, teacher, schedule, one step's losses, processes together, state on disk."""
