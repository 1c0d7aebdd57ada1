"""The report of an evaluation: JSON for machines; a page, pictures and a console table for people.

`files.write` makes all of it, `console.console_table` prints it. Nothing is imported here: training
needs `runs` alone, and every rank would wait for the drawing library.
"""
