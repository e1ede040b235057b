"""A run from its configuration: its parts, its course, what it shows, and a piece of it made again."""
