"""The parts of `training.distill`: batches, the student's first weights, its teacher, its schedule, its state."""
