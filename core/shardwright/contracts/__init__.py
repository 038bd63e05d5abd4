"""The six kinds of plugins, one abstract class a file."""
