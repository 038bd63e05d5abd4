"""What there is to choose from: every option of every table, with its costs."""
