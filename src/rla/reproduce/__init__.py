"""`rla reproduce`: the paper's tables and figures as lists of runs, and one page with a verdict on each claim."""
