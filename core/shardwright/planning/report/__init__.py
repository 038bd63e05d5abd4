"""Views of a plan for people: the report, the page, checks, comparisons, explanations."""
