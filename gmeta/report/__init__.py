"""The report of an evaluation: JSON for machines; a page, pictures and a console table for people.

paths = report.write(folder, [run, baseline])
console.print(report.console_table(paths.evaluation))
"""

from gmeta.report.console import console_table
from gmeta.report.evaluation import Evaluation
from gmeta.report.files import ReportPaths, write
from gmeta.report.runs import EvaluatedRun
from gmeta.report.summarise import summarise

__all__ = ["EvaluatedRun", "Evaluation", "ReportPaths", "console_table", "summarise", "write"]
