"""What a meta-learned run must be better than: models that anybody has in an hour.

A bias model (bias.py) and gradient-boosted trees (trees.py), both made from the training split and
from the support rows of the task that is predicted, and a plain run fine-tuned at its best
(finetune.py). Nothing here needs torch or ranks.
"""
