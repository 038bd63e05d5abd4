"""What people read of a plan: the report, the page, checks, comparisons, explanations."""
