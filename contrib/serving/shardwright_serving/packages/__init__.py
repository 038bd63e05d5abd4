"""Packages: trained models as programs that torch alone runs, with the rows of their tables in a file."""
