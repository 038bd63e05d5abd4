"""The report of a plan as one page of HTML: a template over the report's data."""
