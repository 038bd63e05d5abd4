"""Planning: tables, topology, constraints, layouts, options, costs, search, the plan and its document.

Imports no torch.
"""
