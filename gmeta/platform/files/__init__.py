"""Files of this machine: written whole or not at all, checked, never a URL."""
