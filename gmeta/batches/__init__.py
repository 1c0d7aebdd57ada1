"""A batch on its way to the learner: checked, augmented, as episodes, in parts."""
