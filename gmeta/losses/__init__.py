"""What is learnt of the labels of a row: losses, several of them together, ranking."""
