"""The ranks of a job: process groups, their communicators, the store, and who is missing when something fails."""
