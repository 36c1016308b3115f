"""`report.html`: what a run did, on one page."""
