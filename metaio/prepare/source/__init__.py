"""Raw logs: files, their types, faults in text, and what a first look infers."""
