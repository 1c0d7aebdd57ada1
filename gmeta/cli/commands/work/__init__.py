"""What a command does once its options and its config are known to be right. Loads torch, which
takes seconds: a command imports its module here last.
"""
