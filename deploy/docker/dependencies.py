"""Prints what pyproject.toml requires (with the extras named as arguments), a line each, so that an
image can install it in a layer of its own, below the code."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = [line for name in sys.argv[1:] for line in project["optional-dependencies"][name]]
print("\n".join([*project["dependencies"], *extras]))
