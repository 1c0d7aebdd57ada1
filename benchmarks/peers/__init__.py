"""Other meta-learning code on the same model and rows, each behind one small interface."""
