"""Packages for serving: a trained model with quantised tables as programs that need neither this library nor Python.

A package is a folder: programs in three forms, the tables' rows in a file that programs map, and a manifest. The names
stand in ``export`` and ``package``; nothing is imported here.
"""
