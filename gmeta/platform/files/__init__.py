"""Files of this machine, whatever is in them: whole or not there, checked, never a URL."""
