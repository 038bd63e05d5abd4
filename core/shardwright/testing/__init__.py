"""For plugin authors and for our own tests: ranks simulated in one process, and pools of real ones."""
