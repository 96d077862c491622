"""The parts of `training.distill`: batches, teacher, schedule, state."""
