"""Options of every table to choose from, with their costs."""
