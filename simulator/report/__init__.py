"""What a simulated run came to, for people: a page with tables and pictures, or the pictures alone; of one run, or of several compared."""

from simulator.report.page import compare, write_report
from simulator.report.pictures import compare_pictures, write_pictures

__all__ = ["compare", "compare_pictures", "write_pictures", "write_report"]
