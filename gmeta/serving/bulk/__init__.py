"""Predictions for files of any size, in bounded memory."""
