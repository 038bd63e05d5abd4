"""Where tables go: ranks, their memory and links, and what of it is reserved."""
