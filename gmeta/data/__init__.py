"""A batch on its way to the learner: checked, augmented, collated, moved to the device."""
